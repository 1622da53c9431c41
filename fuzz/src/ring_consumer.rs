//! Works on a session segment that the peer overwrites at will, between any two steps of our producer and consumer.
//!
//! The input is a list of steps: a byte that names the step, then its arguments. A run ends at the first violation. No
//! step may panic or access memory outside the segment.

use std::sync::LazyLock;

use wormhole_lock::Mutex;
use wormhole_ring::{
    layout::{MAX_BODY, RING_BYTES, SEGMENT_BYTES, SLOT_PAYLOAD, UNIT, session},
    memory::OwnedMemory,
    ring::{Consumer, Producer, RecordBuf, RecordHead},
    slot::{AnswerSlots, SlotIndex},
};

use crate::Steps;

/// Region of all runs, since two megabytes are costly to allocate.
static REGION: LazyLock<Mutex<OwnedMemory>> =
    LazyLock::new(|| Mutex::new(OwnedMemory::segments(1)));

pub fn run(input: &[u8]) {
    let region = REGION.lock();
    // SAFETY: the region outlives all of them, and its lock is held: one thread works on it.
    let (window, producer, mut consumer, slots) = unsafe {
        region.clear();
        let session = region.session(0).unwrap();
        (
            region.window().unwrap(),
            Producer::new(session.clone()),
            Consumer::new(session.clone()),
            AnswerSlots::new(session),
        )
    };
    let slot = SlotIndex::new(0).unwrap();
    let mut buf = Box::new(RecordBuf::new());
    let mut payload = [0; SLOT_PAYLOAD];
    let mut steps = Steps(input);
    while let Some([step]) = steps.next() {
        match step % 8 {
            // The peer writes anywhere in the segment.
            0 => {
                let Some([low, middle, high, length]) = steps.next() else {
                    return;
                };
                let offset = u32::from_le_bytes([low, middle, high, 0]) as usize % SEGMENT_BYTES;
                let bytes = steps.take(usize::from(length).min(SEGMENT_BYTES - offset));
                window.write(offset, bytes).unwrap();
            }
            // The peer writes at the consumer's position.
            1 => {
                let Some([length]) = steps.next() else { return };
                let at = place(consumer.taken());
                let bytes = steps.take(usize::from(length).min(RING_BYTES - at));
                window.write(session::RING_BASE + at, bytes).unwrap();
            }
            // The peer publishes an entry of some length over the present bytes.
            2 => {
                let Some([units, pad]) = steps.next() else {
                    return;
                };
                let lap = consumer.taken() / RING_BYTES as u64;
                let commit = lap << 32 | u64::from(pad & 1) << 16 | u64::from(units);
                let at = place(consumer.taken());
                window
                    .write(session::RING_BASE + at, &commit.to_le_bytes())
                    .unwrap();
            }
            // The consumer takes all entries.
            3 | 4 => loop {
                let before = consumer.taken();
                match consumer.take(&mut buf) {
                    Err(_) => return,
                    Ok(None) => break,
                    Ok(Some(_)) => assert!(buf.body().len() <= MAX_BODY),
                }
                let taken = consumer.taken() - before;
                assert!(taken > 0 && taken.is_multiple_of(UNIT as u64));
            },
            5 => match consumer.park() {
                Err(_) => return,
                Ok(_) => consumer.unpark(),
            },
            // A producer pushes.
            6 => {
                let Some([low, high]) = steps.next() else {
                    return;
                };
                let body = [low; MAX_BODY + 1];
                let length = usize::from(u16::from_le_bytes([low, high])) % body.len();
                _ = producer.push(RecordHead::record(u16::from(low)), &[&body[..length]]);
                _ = producer.consumer_parked();
            }
            // A guest thread polls for its answer.
            _ => {
                let Some([sequence]) = steps.next() else {
                    return;
                };
                if let Ok(Some(answer)) = slots.poll(slot, u64::from(sequence)) {
                    slots.copy_payload(slot, 0, &mut payload[..answer.length]);
                }
            }
        }
    }
}

/// Returns the place of a position in the ring.
fn place(position: u64) -> usize {
    usize::try_from(position % RING_BYTES as u64).expect("within the ring")
}
