"""The documents, and what writes the tables in them: `python -m docs.reference`."""
