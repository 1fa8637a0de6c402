"""Block specs of Ada (RTX 40, L4, L40S): the shared memory and the instructions of sm_86."""

import dataclasses

from jax_kernels.pallas.block_specs.sm86 import SM86

SM89 = dataclasses.replace(SM86, capability=(8, 9), inherited_from="sm_86", measured_on=None)
