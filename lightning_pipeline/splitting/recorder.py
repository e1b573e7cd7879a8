"""Running a forward once on stand-ins and writing down what its opened modules do."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_pipeline.errors import SplitError
from lightning_pipeline.splitting.ambient import ambient_settings, changed
from lightning_pipeline.splitting.cost import CostMode, module_hooks, reason_to_stay_whole
from lightning_pipeline.splitting.effects import Effects
from lightning_pipeline.splitting.frames import (
    checkpoint_arguments,
    checkpointed_module,
    definition_location,
    error_location,
    user_location,
)
from lightning_pipeline.splitting.ir import AutogradFunction, Node
from lightning_pipeline.splitting.objects import open_dataclasses
from lightning_pipeline.splitting.pictures import Change, generators_below
from lightning_pipeline.splitting.program import PLAIN_TYPES
from lightning_pipeline.splitting.sandbox import Sandbox
from lightning_pipeline.splitting.tape import Before, RecordingError, Tape, are_written, marks
from lightning_pipeline.splitting.torch_private import (
    VALUE_DEPENDENT,
    CheckpointFunction,
    noop_context_fn,
    pytree,
    saved_tensor_hooks,
)
from lightning_pipeline.splitting.trial import SHAPE_CURE, TrialError, trial_run
from lightning_pipeline.splitting.watch import EVERY_MODULE

REFUSED_METHODS = {
    "register_hook",
    "register_post_accumulate_grad_hook",
    "backward",
    "numpy",
    "resize_",
}
WITHOUT_EFFECT = {"retain_grad", "share_memory_"}
MOVE_CODE = "Move this code into a submodule of its own, which then stays whole"


class Recorder(TorchFunctionMode):
    """Records operations of opened modules, and calls of the modules that are leaves.

    Args:
        sandbox: Stand-ins of the module's weights.
        cost: Counts operations; it must be entered before the recorder.
        leaves: Dotted names of the submodules that stay whole.
    """

    def __init__(self, sandbox: Sandbox, cost: CostMode, leaves: frozenset[str]) -> None:
        super().__init__()
        self.sandbox, self.cost, self.leaves = sandbox, cost, leaves
        self.tape = Tape(sandbox, cost)
        self.called_leaves: set[str] = set()
        self.off = self.on_trial = False
        self.start = ambient_settings()
        self.start_hooks = saved_tensor_hooks()
        self.effects = Effects(sandbox, self.tape)

    def record(self, forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Run ``forward`` as the outermost module's own code."""
        self.effects.begin()
        out = self._open("", lambda: forward(*args, **kwargs))
        open_dataclasses(out)
        self._check_rebound()
        return out

    # ---- operations of opened modules

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.on_trial or (self.off and not self.sandbox.has_placeholders):
            return func(*args, **kwargs)
        args, kwargs = self._with_stand_ins(args, kwargs)
        if self.off:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if func is torch.autograd.grad:
            raise self.tape.fail("torch.autograd.grad needs a graph that no cut divides", MOVE_CODE)
        if name in REFUSED_METHODS:
            raise self.tape.fail(f"Tensor.{name} cannot be recorded", MOVE_CODE)
        if name == "__set__":
            raise self.tape.fail("it assigns to an attribute of a tensor", MOVE_CODE)
        before = Before(self.cost, args, kwargs)
        try:
            out = func(*args, **kwargs)
        except VALUE_DEPENDENT as error:
            raise self._value_dependent(error) from error
        if name in WITHOUT_EFFECT:
            return out
        return self._operation(func, args, kwargs, out, before)

    def _with_stand_ins(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Weights that were reached by another way than their module, a list say."""
        originals = self.sandbox.stand_ins
        if not any(id(arg) in originals for arg in pytree.tree_leaves((args, kwargs))):
            return args, kwargs
        return pytree.tree_map(lambda leaf: originals.get(id(leaf), leaf), (args, kwargs))

    def _operation(self, func: Any, args: tuple, kwargs: dict, out: Any, before: Before) -> Any:
        has_output = any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(out))
        if not has_output and not before.written():
            return out  # a shape, a device: concrete, since a recording is for one signature
        return self._emit(func, args, kwargs, out, before)

    def on_function(
        self, original: Callable[..., Any], function: type[Any], args: tuple, kwargs: dict
    ) -> Any:
        """Record a custom autograd function as one node."""
        if self.off:
            return original(*args, **kwargs)
        if function is CheckpointFunction:
            raise self.tape.fail(
                "it runs torch.utils.checkpoint with use_reentrant=True",
                "Pass use_reentrant=False",
            )
        self.off = True
        try:
            before = Before(self.cost, args, kwargs)
            out = original(*args, **kwargs)
        finally:
            self.off = False
        return self._operation(AutogradFunction(function), args, kwargs, out, before)

    def _emit(
        self, target: Any, args: tuple, kwargs: dict, out: Any, before: Before, **extra: Any
    ) -> Any:
        tape = self.tape
        self.effects.check_draws(tape.stack[-1])
        ambient = ambient_settings()
        generators = extra.pop("generators", frozenset()) | self.effects.generators((args, kwargs))
        node = Node(
            target=target,
            args=tape.template(tuple(args)),
            kwargs=tape.template(dict(kwargs)),
            single=isinstance(out, Tensor),
            where=tape.stack[-1],
            location=user_location(),
            ambient=changed(ambient, self.start),
            checkpoint=self._checkpoint(target, ambient),
            generators=generators,
            **extra,
        )
        return tape.add(node, before, out, self._silent_view)

    def _silent_view(self, tensor: Tensor) -> Tensor:
        off, self.off = self.off, True
        try:
            return tensor.view_as(tensor)
        finally:
            self.off = off

    def _checkpoint(self, target: Any, ambient: tuple) -> dict[str, Any] | None:
        """Arguments of the checkpoint around this call; it must be around nothing else."""
        hooks = saved_tensor_hooks()
        if hooks == self.start_hooks and ambient[0] == self.start[0]:
            return None
        found = checkpoint_arguments(Recorder.record.__code__)
        if found is None:
            if hooks != self.start_hooks:
                raise self.tape.fail("it runs under saved-tensor hooks", MOVE_CODE)
            return None
        module = checkpointed_module(found["function"])
        is_leaf = isinstance(target, str) and self.sandbox.module.get_submodule(target) is module
        if not is_leaf or found["use_reentrant"] is not False:
            raise self.tape.fail(
                "it runs torch.utils.checkpoint over more than one call of a submodule",
                "Checkpoint submodules one by one, with use_reentrant=False",
            )
        arguments = {"use_reentrant": False, "preserve_rng_state": found.get("preserve", True)}
        if found["context_fn"] is not noop_context_fn:
            arguments["context_fn"] = found["context_fn"]
        return arguments

    # ---- calls of modules

    def on_call(
        self, original: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict
    ) -> Any:
        """Record a leaf, look into any other submodule."""
        name = self.sandbox.names.get(id(module))
        if name is None or (not self.off and self.tape.stack[-1] == name):
            return original(module, *args, **kwargs)
        if self.off:
            return self._inside(name, original, module, args, kwargs)
        self.effects.check(self.tape.stack[-1])
        open_dataclasses((args, kwargs))
        if name in self.leaves:
            return self._leaf(name, original, module, args, kwargs)
        reason = reason_to_stay_whole(module)
        if reason is not None:  # which it may have got since it was opened first
            raise self.tape.fail(reason, MOVE_CODE, definition_location(module), name)
        return self._open(name, lambda: original(module, *args, **kwargs))

    def _open(self, name: str, run: Callable[[], Any]) -> Any:
        self.tape.stack.append(name)
        try:
            out = run()
            self.effects.check(name)
            return out
        except SplitError:
            raise
        except VALUE_DEPENDENT as error:
            raise self._value_dependent(error, name) from error
        except Exception as error:
            raise self.tape.fail(
                f"it raised {type(error).__name__}: {error}",
                "If it runs by itself, keep this code in a submodule of its own",
                error_location(error),
                name,
            ) from error
        finally:
            self.tape.stack.pop()

    def _inside(
        self, name: str, original: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict
    ) -> Any:
        self.cost.inside.append(name)
        try:
            return original(module, *args, **kwargs)
        finally:
            self.cost.inside.pop()

    def _leaf(
        self, name: str, original: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict
    ) -> Any:
        self.called_leaves.add(name)
        self.off = True
        try:
            return self._call_leaf(name, original, module, args, kwargs)
        finally:
            self.off = False

    def _call_leaf(
        self, name: str, original: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict
    ) -> Any:
        tape, sandbox = self.tape, self.sandbox
        tape.template((args, kwargs))
        before, given = Before(self.cost, args, kwargs), pytree.tree_flatten((args, kwargs))
        state = sandbox.state_of(module)
        weights = [item.tensor for item in state]
        marked = marks(weights)
        sandbox.written_in_trials.clear()
        try:
            out = self._inside(name, original, module, args, kwargs)
        except SplitError:
            raise
        except Exception as error:
            out = self._trial(name, original, module, args, kwargs, error)
        self._check_given(name, (args, kwargs), given)
        open_dataclasses(out)
        tape.check_output(name, out)
        reads = {id(item): sandbox.entry_names[id(item.owner), item.key] for item in state}
        written = are_written(weights, marked, self.cost)
        writes = [
            reads[id(item)]
            for item, is_written in zip(state, written, strict=True)
            if item.entries.get(item.key) is not item.tensor
            or is_written
            or id(item.tensor) in sandbox.written_in_trials
        ]
        for item in state:  # a buffer that was bound anew keeps its identity
            item.entries[item.key] = item.tensor
        drew = self.effects.pass_over()
        return self._emit(
            name,
            args,
            kwargs,
            out,
            before,
            state=tuple(dict.fromkeys(reads.values())),
            state_writes=tuple(dict.fromkeys(writes)),
            random=drew,
            has_hooks=any(module_hooks(child) for child in module.modules()),
            generators=frozenset(map(id, generators_below(module))),
        )

    def _trial(
        self,
        name: str,
        original: Callable[..., Any],
        module: nn.Module,
        args: tuple,
        kwargs: dict,
        cause: Exception,
    ) -> Any:
        self.on_trial = True  # there the originals are meant
        try:
            return trial_run(self.sandbox, self.cost, original, module, args, kwargs)
        except Exception as error:
            raise self.tape.fail(
                f"submodule {name!r} runs neither on stand-ins ({type(cause).__name__}: {cause}) "
                f"nor on made-up data ({type(error).__name__}: {error})",
                SHAPE_CURE
                if isinstance(error, TrialError)
                else "See whether the module runs by itself",
                error_location(cause),
            ) from cause
        finally:
            self.on_trial = False

    def _check_given(self, name: str, arguments: Any, given: tuple[list[Any], Any]) -> None:
        """What a leaf does to the lists and objects that it is given would happen twice, or not."""
        leaves, spec = pytree.tree_flatten(arguments)
        changed = spec != given[1]
        if not changed:
            self.tape.template(arguments)
            changed = any(
                now is not before and (type(now) not in PLAIN_TYPES or now != before)
                for now, before in zip(leaves, given[0], strict=True)
            )
        if changed:
            raise self.tape.fail(
                f"submodule {name!r} changes a list, dict or object that it was given",
                "Let it return what it adds",
            )

    # ---- what would be lost or frozen

    def on_assign(self, module: nn.Module, attribute: str, value: object) -> None:
        """Refuse to open modules whose own forward binds state anew or counts."""
        name = self.sandbox.names.get(id(module))
        if self.off or name is None or not self.tape.stack:
            return
        for entries in (module._parameters, module._buffers):
            if entries.get(attribute, value) is not value:
                raise self.tape.fail(
                    f"it binds {attribute!r} of {name or 'itself'!r} to a new tensor",
                    f"Write in place: `self.{attribute}.copy_(...)`",
                )
        old = module.__dict__.get(attribute)
        if attribute == "training" and old is not value:
            raise self.tape.fail(
                f"it switches {name or 'itself'!r} to {'train' if value else 'eval'} mode, which a "
                "recording would not do",
                "Do it in a hook, or override the LightningModule's train()",
            )
        if type(old) in (int, float) and type(value) in (int, float) and old != value:
            raise self.tape.fail(
                f"it changes the number {attribute!r} of {name or 'itself'!r} from {old} to "
                f"{value}, which a recording would do only once",
                f"Keep it as a buffer and write `self.{attribute}.add_(1)`, or change it in a hook",
            )
        if attribute not in EVERY_MODULE and not isinstance(value, nn.Module):
            self.effects.assigned((name, attribute), old, value)

    def on_read(self, original: Callable[..., Any], module: nn.Module, name: str) -> Any:
        """Note what opened modules, and modules that stay whole, read."""
        if not self.tape.stack:
            return original(module, name)
        return self.effects.read(original, module, name, self.off)

    def on_read_trainer(self, original: Callable[..., Any], trainer: Any, name: str) -> Any:
        """Note what opened modules read of the Trainer."""
        if not self.tape.stack or self.off:
            return original(trainer, name)
        return self.effects.read_trainer(original, trainer, name)

    def _check_rebound(self) -> None:
        for item, _ in self.sandbox.rebound():
            owner = self.sandbox.names[id(item.owner)]
            if not self.is_whole(owner):
                raise self.tape.fail(
                    f"it binds {item.name!r} to a new tensor",
                    "Write in place: `copy_`",
                    module=owner,
                )

    def finish(self) -> tuple[list[RecordingError], list[Change]]:
        """What the recording would do once only; see :meth:`Effects.finish`."""
        return self.effects.finish(self.is_whole)

    def is_whole(self, name: str) -> bool:
        """Whether a module is, or is inside, a submodule that was called as a leaf."""
        prefixes = accumulate(name.split("."), "{}.{}".format)
        return any(prefix in self.called_leaves for prefix in prefixes)

    def _value_dependent(self, error: Exception, name: str | None = None) -> SplitError:
        refused = self.tape.fail(
            f"its forward depends on the values of tensors ({error})",
            MOVE_CODE,
            error_location(error) if name is not None else None,
            name,
        )
        refused.depends_on_values = True
        return refused
