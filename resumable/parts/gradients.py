"""Finds the gradients of an optimizer that a later step needs."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import warn
from ..files import sharded_tensor

_ENOUGH = 3
"""After this many zeroed gradients, the script is assumed to zero them always."""


class Gradients:
    """The gradients of one optimizer: those that its last step used, and those that the next one will use.

    A used gradient is not part of the training's state if the script zeroes it before the next backward
    pass. The first backward pass after a step shows whether it does.
    """

    def __init__(self, live: Any) -> None:
        self._live = live
        self.is_captured = False
        """Whether a captured graph makes the steps and computes the gradients."""
        self._used: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._are_kept: bool | None = None
        """Whether the script keeps used gradients for the next step; None: not known yet."""
        self._times = Counter[str]()
        """How often the script has "zeroed" used gradients, and how often it has "removed" them for that."""
        self._is_first = False
        self._has_left_out = False
        """Whether a checkpoint lacks used gradients although it was not known whether they are kept."""
        self._is_without = False
        """Whether the checkpoint that was restored lacks used gradients, and the script may keep them."""
        self._has_body_ended: bool | None = None
        """Whether the current save is at the end of a loop body; None: no save is being made."""
        self.used: list[str] = []
        """The used gradients that `pending` returned last, which the script may zero."""
        self.has_left_out = False
        """Whether `pending`, when it was called last, lacked used gradients that the script may keep."""
        self._restored: list[tuple[Tensor, Tensor, bool]] = []
        """The parameters whose gradients were restored, with these gradients, and whether they are zeros."""
        self._watch: tuple[Tensor, Any] | None = None

    def note_captured(self) -> None:
        """Note that a captured graph makes the steps."""
        self.is_captured = True

    def begin_save(self, *, has_body_ended: bool) -> None:
        """Note that a save begins, at the end of a loop body or in the middle of one."""
        self._has_body_ended = has_body_ended

    def end_save(self) -> None:
        """Note that the save has collected the gradients."""
        self._has_body_ended = None

    def collect(self) -> int | None:
        """Return how often used gradients were zeroed; None if the script keeps them."""
        return None if self._are_kept else self._times["zeroed"]

    def restore(self, times_zeroed: int | None, *, has_left_out: bool) -> None:
        """Restore what `collect` returned, and know what the checkpoint lacks; all else starts fresh."""
        if self._watch is not None:
            self._watch[1].remove()
        self._watch, self._is_first, self._restored = None, False, []
        self._is_without, self._times = has_left_out, Counter(zeroed=times_zeroed or 0)
        self._are_kept = True if times_zeroed is None else False if times_zeroed >= _ENOUGH else None

    def put_in(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Restore gradients that the rest of the window adds to."""
        for parameter, gradient in gradients.items():
            if self.is_captured and parameter.grad is not None:
                # The graph adds to this memory.
                parameter.grad.copy_(gradient)
            else:
                parameter.grad = gradient
        self._restored = [(p, p.grad, False) for p in gradients if p.grad is not None]

    def put_in_zeros(self, parameters: Iterable[Tensor]) -> None:
        """Give parameters a gradient of zeros: with one a step moves them, even if no backward pass does."""
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
            self._restored.append((parameter, parameter.grad, True))

    def present(self, parameters: Mapping[str, Tensor]) -> str:
        """Return which parameters have a gradient, as a 1 or a 0 for each; nothing if none has."""
        if self.is_captured or self._times["removed"]:
            return ""
        found = "".join("01"[_is_plain(p.grad)] for p in parameters.values())
        return found if "1" in found else ""

    def hold(self) -> Callable[[], None]:
        """Return a function that restores these gradients: many scripts zero them before the loop."""
        held = [(*restored, restored[1]._version) for restored in self._restored]
        self._restored = []

        def put_back() -> None:
            for parameter, gradient, are_zeros, version in held:
                # To read them from the file again writes to them, too.
                is_touched = gradient._version != version and not are_zeros
                if is_touched and not sharded_tensor.local(gradient).any():
                    warn(
                        "zero_grad(set_to_none=False) before the loop has zeroed the gradients of a window "
                        "that the resume continues, so its step will differ. Call it before RunState.load, "
                        "or with set_to_none=True. [R14]"
                    )
                    return
                if parameter.grad is None:
                    parameter.grad = gradient

        return put_back

    def stepped(self) -> None:
        """Note that the optimizer has made a step with the current gradients."""
        self._used = used = {}
        for group in self._live.param_groups:
            for p in group["params"]:
                if (g := p.grad) is not None and not g.is_inference():
                    used[id(p)] = weakref.ref(g), g._version
        self._is_first, self._restored = True, []
        if self._watch is None and not self._are_kept:
            self._begin_to_watch()

    def pending(self, parameters: Mapping[str, Tensor], *, is_alone: bool = True) -> dict[str, Tensor]:
        """Return the gradients that a resume needs, by the names of their parameters.

        Used gradients are needed if the script keeps them. Until that is known, they are returned at the end
        of a loop body: if the next one zeroes them, they do no harm. In the middle of a body the script may
        be about to zero them, and a resume does not run the rest of the body. With several processes, each
        has its own, and another number of processes could not use them.
        """
        self.used, self.has_left_out = [], False
        if self.is_captured:
            return {}
        self.has_left_out = self._is_without
        found = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        if not self._are_kept:
            used = {name for name, g in found.items() if self._is_used(parameters[name], g)}
            if self._are_kept is None and is_alone and self._has_body_ended:
                # A copy of all gradients on a device may take memory that the training needs.
                self.used = sorted(name for name in used if found[name].is_cpu)
            left_out = used.difference(self.used)
            if left_out and self._has_body_ended is not None:
                self.has_left_out = self._has_left_out = True
            found = {name: g for name, g in found.items() if name not in left_out}
        return found if any(map(_may_be_nonzero, found.values())) else {}

    def _all(self) -> Iterator[tuple[Tensor, Tensor]]:
        for group in self._live.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is not None:
                    yield parameter, gradient

    def _is_used(self, parameter: Tensor, gradient: Tensor) -> bool:
        there, version = self._used.get(id(parameter), (None, 0))
        return there is not None and there() is gradient and gradient._version == version

    def _begin_to_watch(self) -> None:
        there = [p for p, _ in self._all() if p.requires_grad and p.is_leaf and not p.grad_fn]
        if there:
            smallest, known = min(there, key=torch.Tensor.numel), weakref.WeakMethod(self._before_gradient)

            def hook(_: Tensor) -> None:
                if found := known():
                    found()

            # Otherwise torch warns when the parameters are sent to another process.
            torch.utils.hooks.unserializable_hook(hook)  # type: ignore[no-untyped-call]
            self._watch = smallest, smallest.register_hook(hook)  # type: ignore[no-untyped-call]
            weakref.finalize(self, self._watch[1].remove).atexit = False

    def _warn_of_left_out(self) -> None:
        if self._is_without or self._has_left_out:
            lacking = "earlier ones lack them"
            if self._is_without:
                lacking = "one that it was resumed from lacks them, so start over in another run directory"
            warn(f"this script keeps gradients after a step: later checkpoints have them, {lacking}. [R14]")

    def _before_gradient(self) -> None:
        if not self._is_first or self._watch is None:
            return
        self._is_first = False
        parameter, hook = self._watch
        gradient = parameter.grad
        is_there = gradient is not None and self._is_used(parameter, gradient)
        self._times["removed"] += gradient is None
        if gradient is not None and not is_there:
            if not gradient.is_cpu and (self._are_kept is False or _is_capturing(gradient)):
                # Only its values show whether it was zeroed in place. Reading them would synchronize with
                # the device, and end a capture.
                return
            # All processes must save the same.
            is_there = sharded_tensor.is_sharded(gradient) or bool(gradient.any())
        if is_there:
            self._are_kept = True
            self._warn_of_left_out()
            self._is_without = False
            hook.remove()
        else:
            self._is_without = False
            self._times["zeroed"] = min(self._times["zeroed"] + 1, _ENOUGH)
            self._are_kept = False if self._times["zeroed"] >= _ENOUGH else None


def _is_plain(gradient: Tensor | None) -> bool:
    return (
        gradient is not None and gradient.layout == torch.strided and not sharded_tensor.is_sharded(gradient)
    )


def _may_be_nonzero(gradient: Tensor) -> bool:
    # Reading a gradient on a device would synchronize with it, and a sharded one with other processes.
    if sharded_tensor.is_sharded(gradient):
        return True
    is_plain = gradient.is_cpu and gradient.layout == torch.strided
    return not is_plain or (gradient.numel() > 0 and bool(gradient.any()))


def _is_capturing(gradient: Tensor) -> bool:
    return gradient.is_cuda and torch.cuda.is_current_stream_capturing()
