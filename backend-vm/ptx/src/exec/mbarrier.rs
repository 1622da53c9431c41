//! Barriers in shared memory (PTX ISA 9.7.13.15).
//!
//! An `mbarrier` is one word: the parity of its phase, the number of arrivals that every phase
//! needs, the number that this phase lacks, and the bytes that it still expects.

use super::frame::Frame;
use super::memory::{LaneFault, Lanes, Spaces, Target};
use super::step::{lane_fault, word};
use crate::alu::{Alu, alu1};
use crate::decode::insn::{MbarrierAction, MbarrierArgs, Place};
use crate::error::FaultKind;

/// Bits of a count of arrivals.
const COUNT_BITS: u32 = 20;
const COUNT: u64 = (1 << COUNT_BITS) - 1;
/// Bit offsets of the byte count and of the phase.
const BYTES_AT: u32 = 2 * COUNT_BITS;
const PHASE_AT: u32 = 63;

/// Fields of the word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct State {
    phase: u64,
    expected: u64,
    pending: u64,
    bytes: i64,
}

impl State {
    fn of(word: u64) -> Self {
        Self {
            phase: word >> PHASE_AT,
            expected: word & COUNT,
            pending: word >> COUNT_BITS & COUNT,
            // The byte count is signed: copies may complete before a thread expects their bytes.
            bytes: (word << 1).cast_signed() >> (BYTES_AT + 1),
        }
    }

    fn word(self) -> u64 {
        let bytes = self.bytes.cast_unsigned() << BYTES_AT & !(1 << PHASE_AT);
        self.phase << PHASE_AT | bytes | self.pending << COUNT_BITS | self.expected
    }

    fn arrive(&mut self, count: u64) {
        self.pending = self.pending.saturating_sub(count);
    }

    /// Begins the next phase if this one is complete.
    fn complete(&mut self) {
        if self.pending == 0 && self.bytes == 0 {
            self.phase ^= 1;
            self.pending = self.expected;
        }
    }
}

/// Returns the handler of `mbarrier.pending_count`.
pub(crate) fn pending_count() -> Alu {
    alu1!(u64 => u32, |state| (state >> COUNT_BITS & COUNT) as u32)
}

/// Replaces the word at an address, and returns the old one.
fn update(
    spaces: &mut Spaces<'_, '_>,
    place: &Place,
    lane: usize,
    address: u64,
    f: impl FnOnce(u64) -> u64,
) -> Result<u64, LaneFault> {
    let fault = |kind| lane_fault(kind, lane);
    match spaces.atomic_target(place.space, lane, address, 8) {
        Ok(Target::Private(bytes)) => {
            let old = (&*bytes).try_into().map_or(0, u64::from_le_bytes);
            bytes.copy_from_slice(&f(old).to_le_bytes());
            Ok(old)
        }
        Ok(Target::Global(_)) => Err(fault(FaultKind::AddressSpace { address })),
        Err(kind) => Err(fault(kind)),
    }
}

/// Subtracts bytes that have arrived from those expected.
pub(super) fn complete_bytes(
    spaces: &mut Spaces<'_, '_>,
    place: &Place,
    lane: usize,
    address: u64,
    bytes: u32,
) -> Result<(), LaneFault> {
    update(spaces, place, lane, address, |old| {
        let mut state = State::of(old);
        state.bytes -= i64::from(bytes);
        state.complete();
        state.word()
    })
    .map(|_| ())
}

/// Executes an operation for the lanes of `mask`, one after another. Returns the lanes that are to
/// wait a while because their phase is not complete.
pub(super) fn execute(
    spaces: &mut Spaces<'_, '_>,
    frame: &mut Frame,
    args: &MbarrierArgs,
    mask: u32,
) -> Result<u32, LaneFault> {
    let addresses = args.place.addresses(frame);
    let operands = frame.rows[args.operand as usize];
    let mut complete = 0;
    for lane in Lanes(mask) {
        let count = u64::from(word(&operands, lane)) & COUNT;
        let new = |old: u64| {
            let mut state = State::of(old);
            match args.action {
                MbarrierAction::Init => {
                    state = State {
                        phase: 0,
                        expected: count,
                        pending: count,
                        bytes: 0,
                    };
                    return state.word();
                }
                MbarrierAction::Invalidate => return 0,
                MbarrierAction::Test { .. } => return old,
                MbarrierAction::ExpectBytes => {
                    state.bytes += count.cast_signed();
                    return state.word();
                }
                MbarrierAction::CompleteBytes => state.bytes -= count.cast_signed(),
                MbarrierAction::Arrive => state.arrive(count),
                MbarrierAction::ArriveExpectingBytes => {
                    state.bytes += count.cast_signed();
                    state.arrive(1);
                }
                MbarrierAction::Drop => {
                    state.expected = state.expected.saturating_sub(count);
                    state.arrive(count);
                }
                MbarrierAction::DropExpectingBytes => {
                    state.bytes += count.cast_signed();
                    state.expected = state.expected.saturating_sub(1);
                    state.arrive(1);
                }
            }
            state.complete();
            state.word()
        };
        let at = (args.place.space, addresses[lane]);
        let is_test = matches!(args.action, MbarrierAction::Test { .. });
        if spaces.watch.is_some() && !is_test {
            spaces.watch_mbarrier(lane, at, &args.action, false);
        }
        let old = update(spaces, &args.place, lane, addresses[lane], new)?;
        if let MbarrierAction::Test { parity, .. } = args.action {
            let waited_for = if parity {
                operands[lane] & 1
            } else {
                State::of(operands[lane]).phase
            };
            let over = State::of(old).phase != waited_for;
            complete |= u32::from(over) << lane;
            if spaces.watch.is_some() {
                spaces.watch_mbarrier(lane, at, &args.action, over);
            }
        }
        if let Some(dest) = args.dest {
            frame.rows[dest as usize][lane] = old;
        }
    }
    if let Some(dest) = args.dest_pred {
        let old = &mut frame.preds[dest as usize];
        *old = *old & !mask | complete;
    }
    Ok(match args.action {
        MbarrierAction::Test { suspends: true, .. } => mask & !complete,
        _ => 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_survives_its_word() {
        for bytes in [0, 5, -7, (1 << 20) - 1, -(1 << 20) + 1] {
            for phase in [0, 1] {
                let state = State {
                    phase,
                    expected: 12,
                    pending: 3,
                    bytes,
                };
                assert_eq!(State::of(state.word()), state);
            }
        }
    }

    #[test]
    fn a_phase_needs_its_arrivals_and_its_bytes() {
        let mut state = State {
            phase: 0,
            expected: 2,
            pending: 2,
            bytes: 16,
        };
        state.arrive(2);
        state.complete();
        assert_eq!(state.phase, 0);
        state.bytes -= 16;
        state.complete();
        assert_eq!((state.phase, state.pending), (1, 2));
    }
}
