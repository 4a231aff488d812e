"""Programs that use the client: `demo` draws a contact sheet of all adapters with two real services."""
