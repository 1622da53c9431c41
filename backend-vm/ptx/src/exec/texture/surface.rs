//! Loads, stores and reductions of surfaces.

use super::{Image, Recent};
use crate::decode::insn::{Boundary, Geometry, SurfaceAction, SurfaceArgs};
use crate::error::FaultKind;
use crate::exec::atomic;
use crate::exec::frame::Frame;
use crate::exec::global::{Global, Word};
use crate::exec::launch::Launch;
use crate::exec::memory::LaneFault;
use crate::exec::step::word;

/// Returns the address of a lane's element, `None` if the access is skipped.
fn address(
    frame: &Frame,
    image: &Image,
    args: &SurfaceArgs,
    lane: usize,
    bytes: u32,
) -> Result<Option<u64>, FaultKind> {
    let level = &image.levels[0];
    let [width, height, depth] = level.extent.map(i64::from);
    let coordinate = |reg: u32| i64::from(word(&frame.rows[reg as usize], lane).cast_signed());
    let mut at = [0_i64; 3];
    for (at, &reg) in at.iter_mut().zip(&args.coordinates) {
        *at = coordinate(reg);
    }
    if let Some(layer) = args.layer {
        at[2] = coordinate(layer);
    }
    // The first coordinate counts bytes.
    let row_bytes = width * i64::from(image.texel_bytes());
    let slices = if args.geometry == Geometry::ThreeD {
        depth
    } else {
        i64::from(image.layers)
    };
    let last = [row_bytes - i64::from(bytes), height - 1, slices - 1];
    for (at, last) in at.iter_mut().zip(last) {
        if (0..=last).contains(at) {
            continue;
        }
        match args.boundary {
            Boundary::Clamp if last >= 0 => *at = (*at).clamp(0, last),
            Boundary::Zero => return Ok(None),
            Boundary::Clamp | Boundary::Trap => {
                return Err(FaultKind::IllegalAddress {
                    address: level.address.wrapping_add_signed(*at),
                    bytes,
                    write: args.action != SurfaceAction::Load,
                });
            }
        }
    }
    let [x, y, z] = at.map(i64::cast_unsigned);
    Ok(Some(
        level
            .address
            .wrapping_add(x)
            .wrapping_add(y.wrapping_mul(level.row_pitch))
            .wrapping_add(z.wrapping_mul(level.slice_pitch)),
    ))
}

fn one<T: Word>(
    global: &mut Global<'_>,
    frame: &mut Frame,
    args: &SurfaceArgs,
    lane: usize,
    address: Option<u64>,
) -> Result<(), FaultKind> {
    let count = u32::try_from(args.regs.len()).unwrap_or(1);
    let bytes = T::BYTES * count;
    let store = args.action == SurfaceAction::Store;
    let at = match address {
        Some(address) => Some(global.translate(address, bytes, store)?),
        None => None,
    };
    for (index, &reg) in args.regs.iter().enumerate() {
        let slot = &mut frame.rows[reg as usize][lane];
        let at = at.map(|at| at.wrapping_add(index * T::BYTES as usize));
        match at {
            // SAFETY: `translate` found the aligned elements inside a region that stays valid, and
            // that is writable if this is a store.
            Some(at) if store => unsafe { T::get(*slot).write(at) },
            // SAFETY: as above.
            Some(at) => *slot = unsafe { T::read(at) }.put(),
            None if store => {}
            None => *slot = 0,
        }
    }
    Ok(())
}

/// Executes `suld`, `sust` and `sured` for the lanes of `mask`.
pub(in crate::exec) fn access(
    global: &mut Global<'_>,
    launch: &Launch<'_>,
    frame: &mut Frame,
    args: &SurfaceArgs,
    mask: u32,
) -> Result<(), LaneFault> {
    let handles = frame.rows[args.handle as usize];
    let done = |global: &mut Global<'_>, objects: &mut Recent, lane: usize| {
        let image = objects.surface(launch, handles[lane])?;
        let count = u32::try_from(args.regs.len()).unwrap_or(1);
        let place = address(frame, image, args, lane, args.size * count)?;
        match (args.action, args.size) {
            (SurfaceAction::Reduce(op), _) => match place {
                Some(place) => {
                    let value = frame.rows[args.regs[0] as usize][lane];
                    let at = global.translate(place, args.size, true)?;
                    // SAFETY: `translate` found the aligned element inside a writable region.
                    unsafe { atomic::reduce(at, op, args.size, value) }
                }
                None => Ok(()),
            },
            (_, 1) => one::<u8>(global, frame, args, lane, place),
            (_, 2) => one::<u16>(global, frame, args, lane, place),
            (_, 4) => one::<u32>(global, frame, args, lane, place),
            _ => one::<u64>(global, frame, args, lane, place),
        }
    };
    Recent::beside(global, mask, done)
}
