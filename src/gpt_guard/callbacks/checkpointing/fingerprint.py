"""CheckpointFingerprint: what a run is made of, compared with the earlier run in the same folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.settings import check_types
from gpt_guard.catalogue import finding
from gpt_guard.checkpoint.fingerprint import (
    Fingerprint,
    config_changes,
    config_dict,
    token_list,
    tokenizer_digest,
    unwrap,
    weights_digest,
)
from gpt_guard.checkpoint.fingerprint.record import (
    NAME,
    Files,
    StampFile,
    as_paths,
    config_finding,
    part_finding,
    read_stamp,
    tokenizer_finding,
    write_stamp,
)
from gpt_guard.errors import GuardUsageError
from gpt_guard.records import Finding, Moment, Observation

if TYPE_CHECKING:
    from gpt_guard.hooks.watch import Watch


class CheckpointFingerprint(Guard):
    """Names what this run belongs to, and halts on entry where its folder belongs to something else.

    On entry the digests of what is given are made: the tokenizer, the config, `data` (files or folders, read whole),
    `texts` by name (a chat template). Where the Guardian has a `run_dir`, they are compared with the
    `fingerprint.json` an earlier run left there (GG701, GG702, GG703), and written to it if they agree. Parts that
    only one side knows are not compared. To start anew in the same folder, delete that file.

    The model's own `.config` and, with `weights=True`, the weights as they are on entry (this reads the device) are
    noted for the report, not compared: training changes weights, and a config nobody gave may differ on purpose.
    """

    judged_at = frozenset[Moment]()

    def __init__(
        self,
        tokenizer: Any = None,
        config: Any = None,
        *,
        data: Files = (),
        texts: Mapping[str, str] | None = None,
        weights: bool = False,
    ) -> None:
        check_types(CheckpointFingerprint, locals())
        self.tokenizer = tokenizer
        self.config = config
        self._data = as_paths(data)
        self._texts = _texts(texts)
        self._weights = weights
        self._compared: dict[str, str] = {}
        self._noted: dict[str, str] = {}
        self._unreadable: list[str] = []

    @property
    def parts(self) -> dict[str, str]:
        """Digests by part, as of the last entry; empty before the first."""
        return {**self._noted, **self._compared}

    def fingerprint(self) -> dict[str, str]:
        """Digests by part, for the report."""
        return self.parts

    @property
    def belongings(self) -> dict[str, Any]:
        """The arguments by which `save_checkpoint` and `load_checkpoint` learn what this run belongs to.

        Digests are made here if the guard was never attached, so that a checkpoint can be loaded before the run.
        """
        if not self._compared:
            self._digest()
        parts = {part: digest for part, digest in self._compared.items() if part not in ("tokenizer", "config")}
        return {"tokenizer": self.tokenizer, "config": self.config, "fingerprint": Fingerprint(parts=parts)}

    def attach(self, watch: Watch) -> None:
        super().attach(watch)
        self._digest()
        self._noted = {}
        if self.config is None and (own := _own_config(unwrap(watch.model))) is not None:
            self._noted |= Fingerprint.of(config=own).parts
        if self._weights:
            self._noted["weights"] = weights_digest(watch.model)
        for each in () if watch.run_dir is None else tuple(self._compare(watch.run_dir)):
            watch.submit(each.model_copy(update={"guard": self.name, "step": watch.step, "moment": Moment.START}))

    def judge(self, seen: Observation) -> Iterable[Finding]:
        """Nothing a step could bring is judged here: what a run belongs to is known when it begins."""
        return ()

    def blind_spots(self) -> Iterable[str]:
        return tuple(self._unreadable)

    def _digest(self) -> None:
        self._unreadable = []
        self._compared = Fingerprint.of(texts=self._texts).parts
        for part, value in (("tokenizer", self.tokenizer), ("config", self.config)):
            self._try(**{part: value})
        for path in self._data:
            self._try(data=[path])

    def _try(self, **part: Any) -> None:
        """A part that cannot be read is named as not watched; training goes on."""
        try:
            self._compared |= Fingerprint.of(**part).parts
        except GuardUsageError as error:
            self._unreadable.append(str(error))

    def _compare(self, folder: Path) -> Iterator[Finding]:
        earlier = None
        try:
            earlier = read_stamp(folder)
        except OSError as error:
            # Trouble with the folder, and no word about what is in it: nothing is compared, and nothing written.
            self._unreadable.append(f"{folder / NAME} cannot be read ({error.strerror}): nothing is compared with it")
            return
        except ValueError as error:
            seen = f"the fingerprint of the earlier run cannot be read, and was written anew: {error}"
            yield finding("GG707", seen, likely=["foreign"], severity="warning")
        differences = list(self._differences(earlier, folder / NAME)) if earlier is not None else []
        yield from differences
        if not differences:
            self._write(folder, earlier or StampFile())

    def _differences(self, earlier: StampFile, path: Path) -> Iterator[Finding]:
        where = f"the earlier run in {path}"
        for difference in Fingerprint(parts=self._compared).compare(Fingerprint(parts=earlier.parts)):
            if difference.part == "tokenizer":
                old = earlier.tokens
                if old is not None and tokenizer_digest(old) != difference.theirs:
                    old = None  # edited by hand: show neither
                yield tokenizer_finding(difference, where, old, token_list(self.tokenizer))
            elif difference.part == "config":
                changes = config_changes(earlier.config or {}, config_dict(self.config))
                if changes:  # keys that one side alone has came or went with the code
                    yield config_finding(f"config of {where}", changes)
            else:
                yield part_finding(difference, where)

    def _write(self, folder: Path, earlier: StampFile) -> None:
        tokens = token_list(self.tokenizer) if "tokenizer" in self._compared else earlier.tokens
        config = config_dict(self.config) if "config" in self._compared else earlier.config
        stamp = StampFile(parts={**earlier.parts, **self._compared}, tokens=tokens, config=config)
        try:
            if stamp != earlier:
                write_stamp(folder, stamp)
        except OSError as error:
            self._unreadable.append(f"{folder / NAME} cannot be written ({error.strerror}); a later run cannot compare")


def _texts(given: Any) -> dict[str, str]:
    if not isinstance(given or {}, Mapping) or not all(isinstance(text, str) for text in (given or {}).values()):
        raise GuardUsageError(
            f"CheckpointFingerprint(texts={given!r:.60}) cannot work: expected texts by name, {{'template': '...'}}"
        )
    return dict(given or {})


def _own_config(model: Any) -> dict[str, Any] | None:
    own = getattr(model, "config", None)
    try:
        return None if own is None else config_dict(own)
    except GuardUsageError:  # an attribute of that name which is no config
        return None
