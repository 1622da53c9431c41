//! Reports memory accesses to the checker.

use super::{Checker, Kind, Site, Step};
use crate::decode::insn::{Access, AddressSpace, Base, MbarrierAction, Pc};
use crate::exec::SHARED_WINDOW;
use crate::exec::frame::Frame;
use crate::exec::launch::Launch;
use crate::exec::memory::{Lanes, Spaces, addresses, resolve};

/// Maximum bytes of one access.
const MOST_BYTES: usize = 32;

/// Checker of a block, and the instruction whose accesses it checks.
pub(in crate::exec) struct Watch<'w> {
    pub checker: &'w mut Checker,
    pub launch: &'w Launch<'w>,
    pub block: [u32; 3],
    pub warp: u32,
    pub pc: Pc,
    /// Whether the threads' asynchronous copies make the writes.
    pub asynchronous: bool,
}

impl Watch<'_> {
    fn thread(&self, lane: usize) -> u32 {
        self.warp * 32 + u32::try_from(lane).unwrap_or(0)
    }

    fn access(&mut self, lane: usize, kind: Kind, atomic: bool, at: u64, value: &[u8]) {
        let step = Step {
            site: Site {
                pc: self.pc,
                thread: self.thread(lane),
            },
            kind,
            atomic,
            asynchronous: self.asynchronous && kind == Kind::Write,
        };
        let at = usize::try_from(at).unwrap_or(usize::MAX);
        self.checker
            .access(self.launch, self.block, step, at, value);
    }
}

/// Returns the space of an address, and the offset in it.
fn located(space: AddressSpace, address: u64) -> (AddressSpace, u64) {
    match space {
        AddressSpace::Generic => resolve(address),
        AddressSpace::Global => (space, address),
        space => (space, address & u64::from(u32::MAX)),
    }
}

/// Returns the address under which the checker records atomic operations on a location.
fn object(space: AddressSpace, address: u64) -> u64 {
    match located(space, address) {
        (AddressSpace::Shared, at) => SHARED_WINDOW + at,
        (_, at) => at,
    }
}

impl Spaces<'_, '_> {
    /// Reports a load or a store.
    #[cold]
    pub(in crate::exec) fn watch_access(
        &mut self,
        frame: &Frame,
        access: &Access,
        mask: u32,
        kind: Kind,
    ) {
        let Some(watch) = &mut self.watch else { return };
        if access.space == AddressSpace::Param && access.base == Base::Absolute {
            return;
        }
        let row = addresses(frame, access.base, access.offset);
        let strong = access.order.strong;
        let size = access.size as usize;
        for lane in Lanes(mask) {
            let (space, at) = located(access.space, row[lane]);
            let name = object(access.space, row[lane]);
            let thread = watch.thread(lane);
            if strong && kind == Kind::Read {
                watch.checker.synchronize(thread, name, true, false);
            }
            if space == AddressSpace::Shared {
                let mut value = [0; MOST_BYTES];
                let bytes = (size * access.regs.len()).min(MOST_BYTES);
                if kind == Kind::Write {
                    for (piece, &reg) in value.chunks_exact_mut(size).zip(&access.regs) {
                        piece
                            .copy_from_slice(&frame.rows[reg as usize][lane].to_le_bytes()[..size]);
                    }
                }
                watch.access(lane, kind, strong, at, &value[..bytes]);
            }
            if strong && kind == Kind::Write {
                watch.checker.synchronize(thread, name, false, true);
            }
        }
    }

    /// Reports the read or write of one element off the fast path.
    #[cold]
    pub(in crate::exec) fn watch_element(
        &mut self,
        lane: usize,
        (space, address): (AddressSpace, u64),
        kind: Kind,
        value: &[u8],
    ) {
        let Some(watch) = &mut self.watch else { return };
        if let (AddressSpace::Shared, at) = located(space, address) {
            watch.access(lane, kind, false, at, value);
        }
    }

    /// Reports an atomic operation.
    #[cold]
    pub(in crate::exec) fn watch_atomic(
        &mut self,
        lane: usize,
        space: AddressSpace,
        address: u64,
        bytes: u32,
    ) {
        let Some(watch) = &mut self.watch else { return };
        let thread = watch.thread(lane);
        watch
            .checker
            .synchronize(thread, object(space, address), true, false);
        if let (AddressSpace::Shared, at) = located(space, address) {
            let value = &[0; MOST_BYTES][..(bytes as usize).min(MOST_BYTES)];
            watch.access(lane, Kind::Read, true, at, value);
            watch.access(lane, Kind::Write, true, at, value);
        }
        watch
            .checker
            .synchronize(thread, object(space, address), false, true);
    }

    /// Reports an operation on an `mbarrier` before it is executed. `complete` is whether a test found its
    /// phase complete.
    #[cold]
    pub(in crate::exec) fn watch_mbarrier(
        &mut self,
        lane: usize,
        (space, address): (AddressSpace, u64),
        action: &MbarrierAction,
        complete: bool,
    ) {
        let Some(watch) = &mut self.watch else { return };
        let (thread, name) = (watch.thread(lane), object(space, address));
        let (_, at) = located(space, address);
        let value = [0; 8];
        match action {
            MbarrierAction::Init | MbarrierAction::Invalidate => {
                watch.access(lane, Kind::Write, false, at, &value);
            }
            MbarrierAction::Test { .. } => {
                watch.access(lane, Kind::Read, true, at, &value);
                if complete {
                    watch.checker.synchronize(thread, name, true, false);
                }
            }
            _ => {
                watch.access(lane, Kind::Read, true, at, &value);
                watch.access(lane, Kind::Write, true, at, &value);
                watch.checker.synchronize(thread, name, false, true);
            }
        }
    }

    /// Reports that the copies of a thread arrive at an `mbarrier`.
    #[cold]
    pub(in crate::exec) fn watch_copies(&mut self, lane: usize, space: AddressSpace, address: u64) {
        let Some(watch) = &mut self.watch else { return };
        let thread = watch.thread(lane);
        watch.checker.copies_arrive(thread, object(space, address));
    }
}
