"""The adapters of a request: from its message to checked choices, and what only the fetched adapters can tell."""

import math
from collections.abc import Collection, Mapping, Sequence

from executor.jobs import AdapterChoice
from loraplex.errors import InvalidRequest, ServiceError, TooManyRows
from loraplex.pack_options import PackOptions
from loraplex.v1 import executor_pb2 as pb

MAX_REF_CHARACTERS = 1_000
MAX_NAMES = 100  # of components, and of waived parts
MAX_NAME_CHARACTERS = 100

_MENDED_BY_CALLER = ("INVALID_ARGUMENT", "NOT_FOUND", "PERMISSION_DENIED", "FAILED_PRECONDITION")


def check_adapters(
    selections: Sequence[pb.AdapterSelection], components: Collection[str], num_steps: int
) -> tuple[AdapterChoice, ...]:
    """Checked choices, defaults filled in; `components` are those that adapters can modify. Raises InvalidRequest."""
    choices: list[AdapterChoice] = []
    for position, selection in enumerate(selections):
        field = f"adapters[{position}]"
        _check_ref(selection, field)
        start, end = _steps(selection, field, num_steps)
        _check_components(selection, field, components)
        choice = AdapterChoice(
            ref=selection.ref,
            strength=_strength(selection, field),
            start=start,
            end=end,
            components=tuple(dict.fromkeys(selection.components)),
            options=_options(selection, field),
        )
        if any(_meet(choice, other) for other in choices):
            raise InvalidRequest(
                f"{choice.ref!r} is listed twice for the same steps.",
                field=f"{field}.ref",
                remedy="List it once, with the strength that you want, or for steps that do not overlap.",
            )
        choices.append(choice)
    return tuple(choices)


def of_adapter(error: ServiceError, position: int, ref: str) -> ServiceError:
    """The same error, which came of fetching adapter `position`, in the words of the request.

    Its reference is in the metadata, and its field in `field` where the request can be mended there.
    """
    field = ""
    if error.code in _MENDED_BY_CALLER and error.field != "layout_digest":
        field = f"adapters[{position}].{error.field or 'ref'}"
    shown = ref.partition("?")[0]  # the rest of a URL may be a signature
    return type(error)(
        error.message,
        remedy=error.remedy,
        field=field,
        retry_after_s=error.retry_after_s,
        metadata={**error.metadata, "ref": shown},
    )


def check_touched(choices: Sequence[AdapterChoice], touched: Sequence[Collection[str]]) -> None:
    """Raise InvalidRequest for a choice that would do nothing; `touched` are the components that each file adapts."""
    for position, (choice, components) in enumerate(zip(choices, touched, strict=True)):
        field, adapted = f"adapters[{position}]", ", ".join(sorted(components))
        for component in choice.components:
            if component not in components:
                raise InvalidRequest(
                    f"{choice.ref!r} does not adapt {component}.",
                    field=f"{field}.components",
                    remedy=f"It adapts {adapted}.",
                )
        seen = set(choice.components or components)
        if choice.start > 0 and all(component.startswith("text_encoder") for component in seen):
            raise InvalidRequest(
                f"{choice.ref!r} would adapt text encoders alone, which run before the first step.",
                field=f"{field}.start",
                remedy="Leave start out.",
            )


def check_rows(
    choices: Sequence[AdapterChoice], ranks: Mapping[str, int], digests: Sequence[str], rows_per_sample: int, rows: int
) -> None:
    """Raise TooManyRows when the adapters need more rank rows than a step, or than all of the arena, has.

    `digests` are of the choices, in order, and `ranks` are by digest; `rows` is how many adapters can own.
    """
    for start in sorted({choice.start for choice in choices}):
        needed = [
            ranks[digest]
            for choice, digest in zip(choices, digests, strict=True)
            if choice.start <= start and (start < choice.end or choice.end == 1)
        ]
        if sum(needed) > rows_per_sample:
            raise TooManyRows(
                f"The adapters' ranks are {' + '.join(map(str, needed))} = {sum(needed)}; "
                f"one image can use {rows_per_sample} rank rows at a time.",
                field="adapters",
                remedy="Use fewer adapters or smaller ranks, or an executor with more rows_per_sample.",
            )
    if sum(ranks.values()) > rows:
        raise TooManyRows(
            f"The adapters have {sum(ranks.values())} rank rows together; this executor has {rows}.",
            field="adapters",
            remedy="Use fewer adapters or smaller ranks, or an executor with more arena_rows.",
        )


def _check_ref(selection: pb.AdapterSelection, field: str) -> None:
    if not 0 < len(selection.ref.strip()) <= MAX_REF_CHARACTERS:
        raise InvalidRequest(
            f"An adapter needs a reference of 1 to {MAX_REF_CHARACTERS} characters.",
            field=f"{field}.ref",
            remedy="Name it, or leave the entry out.",
        )


def _strength(selection: pb.AdapterSelection, field: str) -> float:
    strength = selection.strength if selection.HasField("strength") else 1.0
    if not math.isfinite(strength) or abs(strength) > 100:
        raise InvalidRequest(
            f"The strength {strength} is not within -100 to 100.",
            field=f"{field}.strength",
            remedy="1.0 is as trained.",
        )
    return strength


def _steps(selection: pb.AdapterSelection, field: str, num_steps: int) -> tuple[float, float]:
    start, end = selection.start, selection.end if selection.HasField("end") else 1.0
    for name, value in (("start", start), ("end", end)):
        if not 0 <= value <= 1:  # not NaN either
            raise InvalidRequest(
                f"{name} is {value}.",
                field=f"{field}.{name}",
                remedy="Use 0 to 1: a part of the denoising steps.",
            )
    if start >= end:
        raise InvalidRequest(
            f"The adapter would apply from {start} to {end}, to no step.",
            field=f"{field}.end",
            remedy="Let end be above start.",
        )
    if not any(start <= step / num_steps < end for step in range(num_steps)):
        raise InvalidRequest(
            f"None of the {num_steps} steps of this request begins from {start} to below {end}.",
            field=f"{field}.start",
            remedy=f"Widen the range, or use more steps: step i of n (from 0) begins at i / {num_steps}.",
        )
    return start, end


def _check_components(selection: pb.AdapterSelection, field: str, components: Collection[str]) -> None:
    for component in selection.components:
        if component not in components:
            raise InvalidRequest(
                f"Adapters do not modify {component!r} of this base model.",
                field=f"{field}.components",
                remedy=f"Use some of {', '.join(sorted(components))}.",
            )


def _options(selection: pb.AdapterSelection, field: str) -> PackOptions:
    """What the store is asked for; it checks the values. Here only what would be a burden to carry there."""
    options = PackOptions.from_proto(selection.options)
    names = (options.denoiser, *options.waived)
    if len(names) > MAX_NAMES or max(map(len, names)) > MAX_NAME_CHARACTERS or not math.isfinite(options.max_error):
        raise InvalidRequest(
            "The options are not usable.",
            field=f"{field}.options",
            remedy=f"Name at most {MAX_NAMES} parts in {MAX_NAME_CHARACTERS} characters each, and a finite max_error.",
        )
    return options


def _meet(one: AdapterChoice, other: AdapterChoice) -> bool:
    """Whether two choices add the same file to the same component in the same step."""
    if (one.ref, one.options) != (other.ref, other.options):
        return False
    if one.components and other.components and not set(one.components) & set(other.components):
        return False
    return one.start < other.end and other.start < one.end
