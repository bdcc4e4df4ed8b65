"""One thread of torch's for each process of the tests, where nobody asks for more.

Two test processes run at a time, and many start ranks. Threads that outnumber the cores spin at every
barrier: on two busy cores one thread takes about half the CPU time of two.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
