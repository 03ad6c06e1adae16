"""The chips that can be compiled for without having one."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """What XLA's compiler asks of a chip, with the numbers of XLA's own specification of it.

    Attributes:
        isa: the instruction set, as AMD's tools name it. mach: its number in a code object's ELF flags (LLVM's
            AMDGPU usage guide, EF_AMDGPU_MACH).
        spec: the specification of XLA that the numbers are from. XLA has none of the MI355X, which has the
            instruction set of the MI350X and higher clocks.
        cores: compute units. shared_memory: bytes a work-group may share. bandwidth: bytes a second. memory: bytes.
        clock: GHz.
        fp8: the 8-bit float format whose matrix instructions it has.
    """

    isa: str
    mach: int
    spec: str
    cores: int
    shared_memory: int
    bandwidth: int
    memory: int
    clock: float
    fp8: str

    def target_config(self) -> str:
        """XLA's `GpuTargetConfigProto` of the chip, as text."""
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024
              threads_per_warp: 64
              shared_memory_per_block: {self.shared_memory}
              shared_memory_per_block_optin: {self.shared_memory}
              shared_memory_per_core: {self.shared_memory}
              threads_per_core_limit: 2048
              core_count: {self.cores}
              fpus_per_core: 128
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65536
              block_dim_limit_z: 65536
              memory_bandwidth: {self.bandwidth}
              l2_cache_size: 4194304
              clock_rate_ghz: {self.clock}
              device_memory_size: {self.memory}
              registers_per_core_limit: 131072
              registers_per_block_limit: 131072
              rocm_compute_capability {{ gcn_arch_name: "{self.isa}:sramecc+:xnack-" }}
            }}
            platform_name: "ROCM"
            dnn_version_info {{ }}
            device_description_str: "{self.spec}"
        """


CHIPS = {
    "gfx950": Chip("gfx950", 0x4F, "MI350X", 256, 163840, 7_782_000_000_000, 270_566_162_432, 2.2, "float8_e4m3fn"),
    "gfx942": Chip("gfx942", 0x4C, "MI300X", 304, 65536, 6_810_000_000_000, 270_566_162_432, 2.1, "float8_e4m3fnuz"),
}
"""Chips by instruction set."""
