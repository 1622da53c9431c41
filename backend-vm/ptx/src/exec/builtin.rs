//! Functions that the device runtime provides to kernels.

use std::sync::atomic::Ordering;

use super::frame::FrameId;
use super::memory::{LaneFault, Lanes, Spaces};
use super::printf;
use super::warp::{Context, Warp};
use crate::decode::insn::{AddressSpace, Builtin, Call, Param, Slot};
use crate::error::FaultKind;

/// Maximum length of a string that is read from a kernel's memory.
const MAX_TEXT: usize = 64 << 10;

/// Reads a NUL-terminated string at a generic address.
pub(super) fn text(
    spaces: &mut Spaces<'_, '_>,
    lane: usize,
    address: u64,
) -> Result<Vec<u8>, FaultKind> {
    let mut bytes = Vec::new();
    while bytes.len() < MAX_TEXT {
        let at = address.wrapping_add(bytes.len() as u64);
        let byte: u8 = spaces.read(AddressSpace::Generic, lane, at)?;
        if byte == 0 {
            break;
        }
        bytes.push(byte);
    }
    Ok(bytes)
}

impl Warp {
    /// Returns the value of an argument of at most 8 bytes.
    fn argument(&self, frame: FrameId, param: &Param, lane: usize) -> u64 {
        let frame = self.frames.get(frame);
        match param.slot {
            Slot::Row(reg) => frame.rows[reg as usize][lane],
            Slot::Memory(at) => {
                let mut value = [0; 8];
                let address = u64::from(frame.local_base + at);
                if let Some(found) = self.local.slice(lane, address, param.bytes.min(8)) {
                    value[..found.len()].copy_from_slice(found);
                }
                u64::from_le_bytes(value)
            }
        }
    }

    fn give(&mut self, frame: FrameId, param: &Param, lane: usize, value: u64) {
        let frame = self.frames.get_mut(frame);
        match param.slot {
            Slot::Row(reg) => frame.rows[reg as usize][lane] = value,
            Slot::Memory(at) => {
                let address = u64::from(frame.local_base + at);
                if let Some(place) = self.local.slice_mut(lane, address, param.bytes.min(8)) {
                    let length = place.len();
                    place.copy_from_slice(&value.to_le_bytes()[..length]);
                }
            }
        }
    }
}

/// Calls `function` in the lanes of `mask`, one after another.
pub(super) fn call(
    warp: &mut Warp,
    cx: &mut Context<'_, '_>,
    function: Builtin,
    call: &Call,
    frame: FrameId,
    mask: u32,
) -> Result<(), LaneFault> {
    for lane in Lanes(mask) {
        let mut args = [0; 5];
        for (value, param) in args.iter_mut().zip(&call.args) {
            *value = warp.argument(frame, param, lane);
        }
        let result = one(warp, cx, function, &args, lane);
        let result = result.map_err(|kind| LaneFault {
            kind,
            lane: u32::try_from(lane).unwrap_or(0),
        })?;
        if let Some(param) = call.returns.first() {
            warp.give(frame, param, lane, result);
        }
    }
    Ok(())
}

fn one(
    warp: &mut Warp,
    cx: &mut Context<'_, '_>,
    function: Builtin,
    args: &[u64; 5],
    lane: usize,
) -> Result<u64, FaultKind> {
    let launch = cx.launch;
    match function {
        Builtin::Vprintf => {
            let mut spaces = Warp::spaces(&mut warp.local, cx, (warp.index, 0));
            let (printed, count) = printf::format(&mut spaces, lane, args[0], args[1])?;
            launch.output.printf(&printed);
            Ok(count)
        }
        Builtin::Malloc => Ok(launch
            .config
            .heap
            .and_then(|heap| heap.malloc(args[0]))
            .unwrap_or(0)),
        Builtin::Free => {
            if args[0] != 0 && !launch.config.heap.is_some_and(|heap| heap.free(args[0])) {
                return Err(FaultKind::IllegalAddress {
                    address: args[0],
                    bytes: 1,
                    write: true,
                });
            }
            Ok(0)
        }
        Builtin::SetConditional => {
            let [handle, value, ..] = *args;
            let number = handle.wrapping_sub(1);
            let place = usize::try_from(number).ok();
            let condition = place.and_then(|place| launch.config.conditions.get(place));
            #[expect(
                clippy::cast_possible_truncation,
                reason = "the value is a 32-bit parameter"
            )]
            let value = value as u32;
            condition
                .map(|condition| condition.store(value, Ordering::Relaxed))
                .ok_or(FaultKind::InvalidCondition { handle })?;
            Ok(0)
        }
        Builtin::AssertFail => {
            let (block, index) = (cx.block, warp.index);
            let mut spaces = Warp::spaces(&mut warp.local, cx, (warp.index, 0));
            let mut line = text(&mut spaces, lane, args[1])?;
            #[expect(
                clippy::cast_possible_truncation,
                reason = "the line is a 32-bit parameter"
            )]
            let number = args[2] as u32;
            line.extend_from_slice(format!(":{number}: ").as_bytes());
            line.extend(text(&mut spaces, lane, args[3])?);
            let [x, y, z] = block;
            let [tx, ty, tz] = launch.thread_index(index * 32 + u32::try_from(lane).unwrap_or(0));
            line.extend_from_slice(
                format!(": block: [{x},{y},{z}], thread: [{tx},{ty},{tz}] Assertion `").as_bytes(),
            );
            line.extend(text(&mut spaces, lane, args[0])?);
            line.extend_from_slice(b"` failed.\n");
            launch.output.assertion(&line);
            Err(FaultKind::Assert)
        }
    }
}
