//! Copies between global and shared memory: `cp.async` and `cp.async.bulk`.

use super::check::Checker;
use super::frame::Frame;
use super::mbarrier::complete_bytes;
use super::memory::{LaneFault, Lanes, Spaces};
use super::step::{lane_fault, pred, word};
use crate::decode::insn::{BulkCopy, Copy, CopyGroup, Place};
use crate::error::FaultKind;

/// Unit of bulk copies: their addresses and sizes are multiples of it.
const BULK: u32 = 16;

/// Executes a `cp.async`.
pub(super) fn execute(
    spaces: &mut Spaces<'_, '_>,
    frame: &Frame,
    copy: &Copy,
    mask: u32,
) -> Result<(), LaneFault> {
    let (from, to) = (copy.source.addresses(frame), copy.dest.addresses(frame));
    if let Some(watch) = &mut spaces.watch {
        watch.asynchronous = true;
    }
    let ignored = copy.ignore.map_or(0, |source| pred(frame, source));
    for lane in Lanes(mask) {
        let wanted = match copy.source_bytes {
            _ if ignored >> lane & 1 == 1 => 0,
            Some(reg) => word(&frame.rows[reg as usize], lane).min(copy.bytes),
            None => copy.bytes,
        };
        one(spaces, copy, lane, from[lane], to[lane], wanted)
            .map_err(|kind| lane_fault(kind, lane))?;
    }
    Ok(())
}

fn one(
    spaces: &mut Spaces<'_, '_>,
    copy: &Copy,
    lane: usize,
    from: u64,
    to: u64,
    wanted: u32,
) -> Result<(), FaultKind> {
    let bytes = copy.bytes;
    let mut buffer = [0; BULK as usize];
    let misaligned = |address| FaultKind::Misaligned { address, bytes };
    if from & u64::from(bytes - 1) != 0 {
        return Err(misaligned(from));
    }
    if wanted == bytes {
        fetch(
            spaces,
            &copy.source,
            lane,
            from,
            &mut buffer[..bytes as usize],
        )?;
    } else {
        for (address, byte) in (from..).zip(buffer.iter_mut().take(wanted as usize)) {
            *byte = spaces.read(copy.source.space, lane, address)?;
        }
    }
    if to & u64::from(bytes - 1) != 0 {
        return Err(misaligned(to));
    }
    put(spaces, &copy.dest, lane, to, &buffer[..bytes as usize])
}

/// Reads aligned words.
fn fetch(
    spaces: &mut Spaces<'_, '_>,
    place: &Place,
    lane: usize,
    from: u64,
    buffer: &mut [u8],
) -> Result<(), FaultKind> {
    for (address, word) in (from..).step_by(4).zip(buffer.chunks_exact_mut(4)) {
        let value: u32 = spaces.read(place.space, lane, address)?;
        word.copy_from_slice(&value.to_le_bytes());
    }
    Ok(())
}

/// Writes aligned words.
fn put(
    spaces: &mut Spaces<'_, '_>,
    place: &Place,
    lane: usize,
    to: u64,
    bytes: &[u8],
) -> Result<(), FaultKind> {
    for (address, word) in (to..).step_by(4).zip(bytes.chunks_exact(4)) {
        let value = word.try_into().map_or(0, u32::from_le_bytes);
        spaces.write(place.space, lane, address, value)?;
    }
    Ok(())
}

/// Executes a `cp.async.bulk`.
pub(super) fn execute_bulk(
    spaces: &mut Spaces<'_, '_>,
    frame: &Frame,
    copy: &BulkCopy,
    mask: u32,
) -> Result<(), LaneFault> {
    let (from, to) = (copy.source.addresses(frame), copy.dest.addresses(frame));
    let barriers = copy.barrier.map(|barrier| barrier.addresses(frame));
    if let Some(watch) = &mut spaces.watch {
        watch.asynchronous = true;
    }
    let sizes = &frame.rows[copy.bytes as usize];
    for lane in Lanes(mask) {
        let bytes = word(sizes, lane);
        let (mut from, mut to) = (from[lane], to[lane]);
        let unaligned = [from, to, u64::from(bytes)]
            .into_iter()
            .find(|value| value % u64::from(BULK) != 0);
        if let Some(address) = unaligned {
            let kind = FaultKind::Misaligned {
                address,
                bytes: BULK,
            };
            return Err(lane_fault(kind, lane));
        }
        for _ in 0..bytes / BULK {
            let mut buffer = [0; BULK as usize];
            let copied = fetch(spaces, &copy.source, lane, from, &mut buffer)
                .and_then(|()| put(spaces, &copy.dest, lane, to, &buffer));
            copied.map_err(|kind| lane_fault(kind, lane))?;
            from = from.wrapping_add(u64::from(BULK));
            to = to.wrapping_add(u64::from(BULK));
        }
        if let (Some(place), Some(addresses)) = (&copy.barrier, &barriers) {
            if spaces.watch.is_some() {
                spaces.watch_copies(lane, place.space, addresses[lane]);
            }
            complete_bytes(spaces, place, lane, addresses[lane], bytes)?;
        }
    }
    Ok(())
}

/// Reports operations on groups of copies to the checker, if there is one.
pub(super) fn watch_group(checker: Option<&mut Checker>, group: CopyGroup, warp: u32, mask: u32) {
    let Some(checker) = checker else { return };
    for lane in Lanes(mask) {
        let thread = warp * 32 + u32::try_from(lane).unwrap_or(0);
        match group {
            CopyGroup::Commit => checker.commit_copies(thread),
            CopyGroup::Wait { but } => checker.wait_for_copies(thread, but),
        }
    }
}
