//! Green contexts.

use super::arrays::download;
use super::{Check, NON_BLOCKING, Outcome, PAGE, holds, same, worked};
use crate::{CuError, Device, Fill};

pub const CHECKS: &[Check] = &[
    Check {
        name: "the multiprocessors of a device are divided without a remainder that is lost",
        run: parts,
    },
    Check {
        name: "work of a green context's streams is done",
        run: streams,
    },
];

fn parts(device: &dyn Device) -> Outcome {
    let all = worked("multiprocessors", device.multiprocessors(None))?;
    holds(
        "there are some, and parts of them",
        all.least >= 1 && all.least <= all.count,
    )?;
    let counted = worked("count", device.split(&all, 0, 1, 0))?;
    same("groups of a count", counted.groups.len(), 0)?;
    let split = worked("split", device.split(&all, 0, 1, 256))?;
    same("groups", split.groups.len(), counted.possible as usize)?;
    let parts = split.groups.iter().chain(&split.rest);
    same("all parts", parts.map(|part| part.count).sum(), all.count)?;
    let one = worked("one group", device.split(&all, 0, 1, 1))?;
    let rest = one.rest.map_or(0, |rest| rest.count);
    same(
        "one group and the rest",
        one.groups[0].count + rest,
        all.count,
    )?;
    for (from, least) in [(&all, all.count + 1), (&one.groups[0], 1)] {
        let refused = device.split(from, 0, least, 1);
        same(
            "a split that cannot be",
            refused,
            Err(CuError::INVALID_RESOURCE_CONFIGURATION),
        )?;
    }
    same(
        "flags that exclude each other",
        device.split(&all, 3, 1, 1),
        Err(CuError::INVALID_VALUE),
    )
}

fn streams(device: &dyn Device) -> Outcome {
    let all = worked("multiprocessors", device.multiprocessors(None))?;
    let split = worked("split", device.split(&all, 0, 1, 1))?;
    let address = worked("allocate", device.mem_alloc(PAGE as u64))?;
    for (value, parts) in [(7, &split.groups[..]), (8, &[])] {
        let green = worked("create", device.create_green(parts))?;
        let own = worked("its multiprocessors", device.multiprocessors(Some(green)))?;
        same(
            "their number",
            own.count,
            parts.first().map_or(all.count, |part| part.count),
        )?;
        let stream = worked("stream", device.green_stream(green, NON_BLOCKING, 0))?;
        let fill = Fill {
            destination: address,
            pitch: 16,
            width: 4,
            height: 1,
            value,
            element: 4,
        };
        worked("fill", device.fill(fill, stream))?;
        worked("wait", device.synchronize_stream(stream))?;
        let expected: Vec<u8> = [value; 4].into_iter().flat_map(u32::to_le_bytes).collect();
        same("what was filled", download(device, address, 16)?, expected)?;
        worked("destroy", device.destroy_stream(stream))?;
        worked("destroy", device.destroy_green(green))?;
    }
    worked("free", device.mem_free(address))
}
