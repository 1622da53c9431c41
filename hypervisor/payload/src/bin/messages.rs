//! Sends messages of a stream through a buffer in the window, with a doorbell and a wait for each: the classic way of
//! forwarding, as a socket of a VM carries it.
//!
//! | word | writer | meaning |
//! |---|---|---|
//! | 0 | host | address of the buffer: one word with the message's bytes, which the host sets to 0 once the answer is there, then the bytes |
//! | 1 | host | number of rounds |
//! | 2 | host | address of one word per round for its duration in time stamps |
//! | 3 | payload | completed rounds |
//! | 4 | host | handle of a function, in wire format; 0: each round is a request instead of a launch with its fence |
//! | 5 | host | handle of the stream, in wire format |
//! | 6 | host | number of the fence |
//! | 7 | host | the kernel's only parameter, 8 bytes |
#![no_std]
#![no_main]

use core::sync::atomic::Ordering;

use wormhole_api::{Encode, Fence, FenceWrite, Handle, LaunchKernel, MemGetInfo};
use wormhole_payload::{
    Parameters, entry, launch_of_one, ring, shared_word, timestamp, wait, window,
};
use wormhole_ring::fence::FenceIndex;
use wormhole_ring::ring::RecordHead;
use wormhole_ring::slot::SlotIndex;
use wormhole_ring::stream::{Message, Request};

entry!(main);

/// Answer slot. The payload is the only thread of its session.
const SLOT: u16 = 0;

fn main(parameters: Parameters, _vcpu: u64) -> u32 {
    let buffer = parameters.load(0);
    let launches = parameters.load(4) != 0;
    let number = u32::try_from(parameters.load(6)).unwrap_or(u32::MAX);
    let (Some(index), Some(fence)) = (FenceIndex::new(number), Fence::new(number)) else {
        return 1;
    };
    for round in 1..=parameters.load(1) {
        let start = timestamp();
        let done = if launches {
            launch(parameters, buffer, (index, fence), round)
        } else {
            request(buffer, round)
        };
        if done.is_none() {
            return 2;
        }
        // SAFETY: the host reserved one word per round at this address.
        let sample = unsafe { shared_word(parameters.load(2) + 8 * (round - 1)) };
        sample.store(timestamp() - start, Ordering::Relaxed);
        parameters.store(3, round);
    }
    0
}

fn request(buffer: u64, sequence: u64) -> Option<()> {
    let head = RecordHead::request(
        <MemGetInfo as wormhole_api::Message>::ID,
        SlotIndex::new(SLOT)?,
        sequence,
    );
    let sent = MemGetInfo {}.encode(|parts| exchange(buffer, Message::Record(head), parts));
    sent.ok()?
}

/// Launches, requests a fence and waits for it: three messages.
fn launch(
    parameters: Parameters,
    buffer: u64,
    (index, fence): (FenceIndex, Fence),
    value: u64,
) -> Option<()> {
    let stream = Handle::from_wire(parameters.load(5))?;
    let argument = parameters.load(7).to_le_bytes();
    let function = Handle::from_wire(parameters.load(4))?;
    let launch = launch_of_one(function, stream, &argument);
    let record = |id| Message::Record(RecordHead::record(id));
    let launched = record(<LaunchKernel as wormhole_api::Message>::ID);
    launch
        .encode(|parts| exchange(buffer, launched, parts))
        .ok()??;
    let fence = FenceWrite {
        stream,
        fence,
        value,
    };
    let fenced = record(<FenceWrite as wormhole_api::Message>::ID);
    fence
        .encode(|parts| exchange(buffer, fenced, parts))
        .ok()??;
    exchange(buffer, Message::Fence(index, value), &[])
}

/// Sends a message and waits for its answer, whose data are not read.
fn exchange(buffer: u64, message: Message, parts: &[&[u8]]) -> Option<()> {
    let bytes = parts.iter().map(|part| part.len()).sum::<usize>();
    let request = Request::new(message, u32::try_from(bytes).ok()?);
    // SAFETY: the host's address of a segment of the window, and of its first word.
    let (segment, length) = unsafe { (window(buffer), shared_word(buffer)) };
    let mut at = size_of::<u64>();
    for part in core::iter::once(request.wire()).chain(parts.iter().copied()) {
        segment.write(at, part).ok()?;
        at += part.len();
    }
    length.store((at - size_of::<u64>()) as u64, Ordering::Release);
    ring();
    while length.load(Ordering::Acquire) != 0 {
        wait();
    }
    Some(())
}
