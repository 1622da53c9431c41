//! Closed lists: flags and enumerations of messages that the driver gets as numbers.
//!
//! The guest's library refuses most other values, but a guest need not use it, and the driver was tried with these values
//! alone. A list has all that `cuda.h` of CUDA 13 names, but for what Wormhole does not offer.

use wormhole_api::CuResult;
use wormhole_api::constants::{
    address_mode, filter_mode, function_cache, graph_dependency_type, graph_instantiate_flags,
    kernel_node_port, memory_handle_type, occupancy_flags, resource_split_flags,
    resource_view_format, stream_flags, texture_flags,
};

/// Values that a field may have.
#[derive(Clone, Copy, Debug)]
pub(super) enum Closed {
    /// Any of these bits.
    Flags(u64),
    /// The numbers up to this one.
    UpTo(u32),
}

use Closed::{Flags, UpTo};

pub(super) const GRAPH_INSTANTIATE: Closed = Flags(graph_instantiate_flags::USE_NODE_PRIORITY);
/// Ports at which a dependency begins and ends, and its type.
pub(super) const FROM_PORT: Closed = UpTo(kernel_node_port::LAUNCH_ORDER as u32);
pub(super) const TO_PORT: Closed = UpTo(0);
pub(super) const DEPENDENCY: Closed = UpTo(graph_dependency_type::PROGRAMMATIC as u32);
pub(super) const HANDLE_TYPES: Closed = flags(memory_handle_type::POSIX_FILE_DESCRIPTOR);
pub(super) const CACHE_CONFIG: Closed = UpTo(function_cache::PREFER_EQUAL);
pub(super) const OCCUPANCY: Closed = flags(occupancy_flags::DISABLE_CACHING_OVERRIDE);
pub(super) const GREEN_SPLIT: Closed = flags(
    resource_split_flags::IGNORE_SM_COSCHEDULING | resource_split_flags::MAX_POTENTIAL_CLUSTER_SIZE,
);
pub(super) const GREEN_STREAM: Closed = flags(stream_flags::NON_BLOCKING);

pub(super) const ADDRESS_MODE: Closed = UpTo(address_mode::BORDER);
pub(super) const FILTER_MODE: Closed = UpTo(filter_mode::LINEAR);
pub(super) const TEXTURE: Closed = flags(
    texture_flags::READ_AS_INTEGER
        | texture_flags::NORMALIZED_COORDINATES
        | texture_flags::SRGB
        | texture_flags::DISABLE_TRILINEAR_OPTIMIZATION
        | texture_flags::SEAMLESS_CUBEMAP,
);
pub(super) const VIEW_FORMAT: Closed = UpTo(resource_view_format::UNSIGNED_BC7);

/// `CUtensorMapDataType`, up to `CU_TENSOR_MAP_DATA_TYPE_16U6_ALIGN16B`.
pub(super) const TENSOR_DATA_TYPE: Closed = UpTo(15);
/// `CUtensorMapInterleave`, up to `CU_TENSOR_MAP_INTERLEAVE_32B`.
pub(super) const TENSOR_INTERLEAVE: Closed = UpTo(2);
/// `CUtensorMapSwizzle`, up to `CU_TENSOR_MAP_SWIZZLE_128B_ATOM_64B`.
pub(super) const TENSOR_SWIZZLE: Closed = UpTo(6);
/// `CUtensorMapL2promotion`, up to `CU_TENSOR_MAP_L2_PROMOTION_L2_256B`.
pub(super) const TENSOR_PROMOTION: Closed = UpTo(3);
/// `CUtensorMapFloatOOBfill`, up to `CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA`.
pub(super) const TENSOR_FILL: Closed = UpTo(1);
/// `CUtensorMapIm2ColWideMode`, up to `CU_TENSOR_MAP_IM2COL_WIDE_MODE_W128`.
pub(super) const TENSOR_WIDE: Closed = UpTo(1);

const fn flags(bits: u32) -> Closed {
    Flags(bits as u64)
}

impl Closed {
    fn has(self, value: u64) -> bool {
        match self {
            Flags(bits) => value & !bits == 0,
            UpTo(last) => value <= u64::from(last),
        }
    }

    /// Refuses a value that is not in the list.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`: it is not.
    pub fn check(self, value: impl Into<u64>) -> Result<(), CuResult> {
        match self.has(value.into()) {
            true => Ok(()),
            false => Err(CuResult::INVALID_VALUE),
        }
    }

    /// Returns the value if it is in the list, or else 0: for a field that the driver does not use.
    pub fn known_or_zero(self, value: u32) -> u32 {
        match self.has(value.into()) {
            true => value,
            false => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_its_values_and_no_others() {
        for known in [0_u32, 1, 2, 3] {
            assert_eq!(CACHE_CONFIG.check(known), Ok(()));
        }
        assert_eq!(TEXTURE.check(0x73_u32), Ok(()));
        for unknown in [4_u32, 8, 0x80, u32::MAX] {
            assert_eq!(CACHE_CONFIG.check(unknown), Err(CuResult::INVALID_VALUE));
            assert_eq!(TEXTURE.check(unknown), Err(CuResult::INVALID_VALUE));
        }
        assert_eq!(GRAPH_INSTANTIATE.check(8_u64), Ok(()));
        for unknown in [1, 2, 4, 1 << 32, u64::MAX] {
            let checked = GRAPH_INSTANTIATE.check(unknown);
            assert_eq!(checked, Err(CuResult::INVALID_VALUE));
        }
        assert_eq!([1, 2].map(|mode| FILTER_MODE.known_or_zero(mode)), [1, 0]);
    }
}
