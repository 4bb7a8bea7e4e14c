"""Makes the clock, or the random bytes of the system, equal in every Python process.

An audit puts this folder first on the path to find out why a script is not repeatable.
"""

import importlib.util
import os
import random
import sys
import time

_what = os.environ.get("RESUMABLE_STILL", "").split()


def _still_clock() -> None:
    import datetime
    import threading

    # Per thread: how often background threads read the clock is a matter of chance.
    own = threading.local()

    def now() -> float:
        # With a clock that stands still, loops would wait for ever.
        own.ticks = getattr(own, "ticks", 0) + 1
        return 1_700_000_000 + float(own.ticks) / 1000

    real = datetime.datetime

    class IsAlsoReal(type):
        # Objects that C creates are not of the class below.
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, real)

    class Datetime(real, metaclass=IsAlsoReal):
        @classmethod
        def now(cls, tz=None):  # type: ignore[no-untyped-def,override]
            return cls.fromtimestamp(now(), tz)

        @classmethod
        def utcnow(cls):  # type: ignore[no-untyped-def,override]
            return cls.fromtimestamp(now())

        @classmethod
        def today(cls):  # type: ignore[no-untyped-def,override]
            return cls.fromtimestamp(now())

    # For pickle.
    Datetime.__module__, Datetime.__name__, Datetime.__qualname__ = "datetime", "datetime", "datetime"
    time.time = now
    time.time_ns = lambda: int(now() * 1e9)
    # Not time.monotonic: waiting for another process would take a thousand times as long.
    time.perf_counter = now
    time.perf_counter_ns = time.time_ns
    datetime.datetime = Datetime  # type: ignore[misc]


def _still_system(is_numpys: bool, is_others: bool) -> None:
    drawn = random.Random(20)
    real = os.urandom

    def urandom(count: int) -> bytes:
        # NumPy's global generator is seeded while numpy.random is imported, before it has a name.
        is_numpy = "numpy" in sys.modules and not hasattr(sys.modules.get("numpy.random.mtrand"), "seed")
        return drawn.randbytes(count) if (is_numpys if is_numpy else is_others) else real(count)

    os.urandom = urandom
    random._urandom = urandom  # type: ignore[attr-defined]
    if is_others:
        seed = random.Random.seed

        def seeded(self, a=None, version=2):  # type: ignore[no-untyped-def]
            seed(self, drawn.getrandbits(64) if a is None else a, version)

        random.Random.seed = seeded  # type: ignore[method-assign]
        # It was bound to the original when random was imported.
        random.seed = random._inst.seed  # type: ignore[attr-defined]


def _leave_benchmark_off(torch) -> None:  # type: ignore[no-untyped-def]
    torch._C._set_cudnn_benchmark(False)
    # The script, or a library, may turn it on at any time: by its name, or with torch.backends.cudnn.flags.
    torch._C._set_cudnn_benchmark = lambda _: None
    vars(type(torch.backends.cudnn))["benchmark"].setter = lambda _: None


class _ChangesTorch:
    """Finds torch as usual, and changes it once it has been imported."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "torch":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def executed(module):  # type: ignore[no-untyped-def]
                execute(module)
                if "torch" in _what:
                    module.manual_seed(20)
                if "benchmark" in _what:
                    _leave_benchmark_off(module)

            spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


if "torch" in _what or "benchmark" in _what:
    sys.meta_path.insert(0, _ChangesTorch())  # type: ignore[arg-type]
if "clock" in _what:
    _still_clock()
if "python" in _what:
    random.seed(20)
if "numpy" in _what or "system" in _what:
    _still_system("numpy" in _what, "system" in _what)

# Import the sitecustomize that this one has hidden.
_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != _here]
_ours = sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize  # noqa: F401
except ImportError:
    if _ours is not None:
        sys.modules["sitecustomize"] = _ours
