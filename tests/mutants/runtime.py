"""Faults in what runs modules, keeps them, and looks at what is given."""

from __future__ import annotations

from . import Mutant

MUTANTS = (
    Mutant("files.fsync", "gradc/files.py", "                os.fsync(file.fileno())\n", "", "a file is renamed before its bytes are on the disk", ("test_files",)),
    Mutant("files.fsync-folder", "gradc/files.py", "        _sync_folder(path.parent)\n", "", "the rename is not brought to the disk", ("test_files",)),
    Mutant("files.in-place", "gradc/files.py", "            os.replace(temporary, path)\n", "            path.write_bytes(temporary.read_bytes())\n            os.unlink(temporary)\n",
           "missing rename: the old file is torn by a kill", ("test_files", "test_fuzz -k kills")),
    Mutant("envelope.digest", "gradc/ir/envelope.py", "if found.hexdigest() != digest:", "if len(digest) != 64:", "a damaged file is taken", ("test_files", "test_fuzz -k containers")),
    Mutant("cache.key", "gradc/runtime/cache.py", 'or found["key"] != _encoded(key):', "or not key:", "an entry of another key is taken",
           ("test_runtime_cpu -k 'entry or cache'",)),
    Mutant("api.cache-key", "gradc/api.py", "fingerprint(), *_toolchain(target))", "fingerprint())", "stale cache key: another compiler's machine code",
           ("test_faults -k keys_hold",)),
    Mutant("api.cache-options", "gradc/api.py", "json.dumps([list(wrt), target, {k: repr(v) for k, v in options.items()}])", "json.dumps([list(wrt), target])", "stale cache key: other options' module",
           ("test_faults -k keys_hold", "test_module -k cache", "test_layouts")),
    Mutant("residuals.versions", "gradc/residuals.py", "            if now != before:\n", "            if now < before:\n", "an input that was changed between forward and backward",
           ("test_torch -k 'changed or place'", "test_torch", "test_faults -k changes_between")),
    Mutant("residuals.module", "gradc/module.py", "if residuals.module is not self.module and not residuals.module.equals(self.module):", "if residuals is None:",
           "residuals of another module are taken",
           ("test_faults -k wrong_cotangents", "test_torch -k of_another_module")),
    Mutant("executable.aliasing", "gradc/runtime/executable.py", "if overlap(array, source) and not own:", "if array is source and not own:", "an output over an input's memory",
           ("test_plans -k over", "test_faults -k 'out_is_written or accumulate'")),
    Mutant("executable.donor", "gradc/runtime/executable.py", 'return "" if any(overlap(arrays[donor], other) for name, other in arrays.items() if name != donor) else donor', "return donor",
           "an output takes the memory of an input that another looks at",
           ("test_faults -k donat",)),
    Mutant("executable.dims-key", "gradc/runtime/executable.py", "key = (shapes, tuple(sorted(dims.items())) if dims else (), tuple(", "key = (shapes, (), tuple(", "stale key: sizes of an earlier call",
           ("test_faults -k dims", "test_bad_arguments", "test_module")),
    Mutant("executable.memory", "gradc/runtime/executable.py", "            if needed > limit.left:", "            if needed > limit.total:", "memory that others have taken is asked for",
           ("test_process -k 'may_have or fit'", "test_memory", "test_faults -k beyond")),
    Mutant("forks.locks", "gradc/process/forks.py", "            each._at_fork_reinit()", "            pass", "a lock that another thread held at a fork is never free in the child",
           ("test_process -k locks", "test_process -k fork")),
    Mutant("ieee.restore", "gradc/process/ieee.py", "            _found[1](self._before)", "            pass", "NumPy of the caller computes in our environment", ("test_process -k environment", "test_determinism")),
)
