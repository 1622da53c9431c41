//! Names and occupancy of kernels, tensor maps, and parameters beyond 4 KiB.

use std::sync::atomic::Ordering;

use wormhole_api::constants::device_attribute::{
    MULTIPROCESSOR_COUNT, TENSOR_MAP_ACCESS_SUPPORTED,
};

use super::{
    Check, HostMemory, Outcome, function, holds, kernel, kernels, load, load_image, same, worked,
};
use crate::{
    ClusterLaunch, CuError, Device, ImageKind, Launch, LaunchEvents, RawFunction, RawStream,
    TensorMap, TensorMapMode,
};

pub const CHECKS: &[Check] = &[
    Check {
        name: "a module and a library name their kernels",
        run: names,
    },
    Check {
        name: "available shared memory is what lets the blocks fit",
        run: available_shared,
    },
    Check {
        name: "clusters of one block are no more than blocks fit",
        run: clusters,
    },
    Check {
        name: "a tensor map is encoded where the device has a unit for it",
        run: tensor_map,
    },
    Check {
        name: "persisting lines of the cache can be reset",
        run: persisting,
    },
    Check {
        name: "a kernel may have parameters of nearly 32 KiB",
        run: large_parameters,
    },
];

const LEGACY: RawStream = RawStream::LEGACY;

/// Returns an attribute of the device.
fn attribute(device: &dyn Device, id: i32) -> i32 {
    let attributes = device.describe().attributes.iter();
    let mut found = attributes.filter(|(known, _)| *known == id);
    found.next().map_or(0, |(_, value)| *value)
}

fn names(device: &dyn Device) -> Outcome {
    let expected = kernels::PLAIN.matches(".entry ").count();
    for kind in [ImageKind::Module, ImageKind::Library] {
        let image = load_image(device, kernels::PLAIN.as_bytes(), kind)?;
        let mut names = Vec::new();
        let mut note = |name: &[u8]| names.push(String::from_utf8_lossy(name).into_owned());
        worked("names", device.kernel_names(image.module, &mut note))?;
        same("how many", names.len(), expected)?;
        for name in ["store", "saxpy", "fall"] {
            let count = names.iter().filter(|found| *found == name).count();
            same(name, count, 1)?;
        }
        for name in &names {
            worked(name, device.function(image.module, name))?;
        }
    }
    Ok(())
}

fn available_shared(device: &dyn Device) -> Outcome {
    let rotate = kernel(device, "rotate")?.function;
    let available = |blocks| device.available_shared(rotate, blocks, 128);
    // So many blocks that each one's share is below the default limit of a kernel.
    for blocks in [6, 8, 12] {
        let bytes = worked("available shared memory", available(blocks))?;
        holds("some is available", bytes > 0)?;
        let fitting = worked("occupancy", device.occupancy(rotate, 128, 0, bytes))?;
        // An H200 has room for one block less than it reports.
        holds("as many blocks fit, or one less", fitting >= blocks - 1)?;
        let fewer = worked("occupancy", device.occupancy(rotate, 128, 0, bytes + 4096))?;
        holds("with more they do not", fewer < blocks)?;
    }
    same("no blocks", available(0), Err(CuError::INVALID_VALUE))
}

fn question(function: RawFunction) -> ClusterLaunch<'static> {
    ClusterLaunch {
        function,
        grid: [64, 1, 1],
        block: [128, 1, 1],
        shared: 0,
        attributes: &[],
    }
}

fn clusters(device: &dyn Device) -> Outcome {
    let rotate = kernel(device, "rotate")?.function;
    let greatest = worked(
        "greatest cluster",
        device.greatest_cluster(&question(rotate)),
    )?;
    holds("a block is a cluster", greatest >= 1)?;
    let one = crate::LaunchAttribute::new(4, {
        let mut value = [0; 64];
        (value[0], value[4], value[8]) = (1, 1, 1);
        value
    });
    let launch = ClusterLaunch {
        attributes: &[one],
        ..question(rotate)
    };
    let clusters = worked("active clusters", device.active_clusters(&launch))?;
    let blocks = worked("occupancy", device.occupancy(rotate, 128, 0, 0))?;
    // An H200 schedules fewer clusters than blocks.
    let processors = attribute(device, MULTIPROCESSOR_COUNT);
    holds(
        "one to a multiprocessor, and no more than blocks",
        (processors..=blocks * processors).contains(&clusters),
    )
}

fn tensor_map(device: &dyn Device) -> Outcome {
    let address = worked("allocate", device.mem_alloc(1 << 16))?;
    let map = TensorMap {
        mode: TensorMapMode::Tiled {
            tile: [16, 16, 0, 0, 0],
        },
        // CU_TENSOR_MAP_DATA_TYPE_FLOAT32.
        data_type: 7,
        rank: 2,
        address,
        dimensions: [64, 64, 0, 0, 0],
        strides: [256, 0, 0, 0],
        steps: [1, 1, 0, 0, 0],
        interleave: 0,
        swizzle: 0,
        promotion: 0,
        fill: 0,
    };
    let encoded = device.encode_tensor_map(&map);
    if attribute(device, TENSOR_MAP_ACCESS_SUPPORTED) == 0 {
        return same("without a unit", encoded, Err(CuError::NOT_SUPPORTED));
    }
    let encoded = worked("encode", encoded)?;
    let moved = worked(
        "replace",
        device.replace_tensor_address(encoded, address + 1024),
    )?;
    holds("it is another map", moved != encoded)?;
    let again = worked("replace", device.replace_tensor_address(moved, address))?;
    same("moved back", again, encoded)?;
    let wrong = TensorMap {
        data_type: 99,
        ..map
    };
    let refused = device.encode_tensor_map(&wrong);
    same("no such type", refused, Err(CuError::INVALID_VALUE))
}

fn persisting(device: &dyn Device) -> Outcome {
    worked("reset", device.reset_persisting_l2())
}

fn large_parameters(device: &dyn Device) -> Outcome {
    const LAST: usize = 32_752;
    let text = format!(
        r"
.version 8.1
.target sm_70
.address_size 64
.visible .entry last(.param .u64 address, .param .align 8 .b8 block[{}])
{{
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [address];
    ld.param.u64 %rd2, [block+{}];
    st.global.u64 [%rd1], %rd2;
    ret;
}}
",
        LAST,
        LAST - 8
    );
    let module = load(device, &text)?;
    let last = function(device, &module, "last")?;
    let layout: Vec<_> = last.parameters.iter().map(|p| (p.offset, p.size)).collect();
    same("the layout", layout, vec![(0, 8), (8, 32_752)])?;
    let host = HostMemory::new(device, 1)?;
    let mut parameters = vec![0; 8 + LAST];
    parameters[..8].copy_from_slice(&host.address(0).to_le_bytes());
    parameters[LAST..].copy_from_slice(&0x1234_5678_9abc_def0_u64.to_le_bytes());
    let launch = Launch {
        function: last.function,
        stream: LEGACY,
        grid: [1; 3],
        block: [1; 3],
        shared: 0,
        attributes: &[],
        events: LaunchEvents::default(),
        parameters: &parameters,
    };
    worked("launch", device.launch(&launch))?;
    worked("synchronize", device.synchronize_stream(LEGACY))?;
    same(
        "the last parameter",
        host.word(0).load(Ordering::Acquire),
        0x1234_5678_9abc_def0,
    )
}
