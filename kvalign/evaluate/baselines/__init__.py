"""Other people's cache coders, to measure ours against (evaluate/comparison.py, benchmarks).

Baseline(shape, Kivi(shape, bits=4))        a CacheCoder (evaluate/protocol.py): real bytes, decoded from alone
fit_kvtc(statistics, shape, ...).at(16.0)    the body coder of KVTC at a nominal ratio
"""

from kvalign.evaluate.baselines.fp8 import Fp8
from kvalign.evaluate.baselines.kivi import Kivi
from kvalign.evaluate.baselines.kvtc import Kvtc, KvtcFit, fit_kvtc
from kvalign.evaluate.baselines.stored import Baseline

__all__ = ["Baseline", "Fp8", "Kivi", "Kvtc", "KvtcFit", "fit_kvtc"]
