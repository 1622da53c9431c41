//! A turn at a queue: packets between the queue and the connections, at most as many as the queue's size. A guest may add
//! buffers for as long as they are taken, and others wait for the thread.

use std::io::{Read, Write};

use virtio_queue::{DescriptorChain, Reader, Writer};
use vm_memory::{Bytes, GuestMemory};
use zerocopy::{FromZeros, IntoBytes};

use super::mux::Mux;
use super::packet::{HEADER_LEN, Header};

/// Maximum payload bytes of one packet, in either direction.
pub(super) const MAX_PAYLOAD: usize = 64 << 10;

/// A queue of a guest with memory of type `M`.
pub(super) trait Ring<M: GuestMemory<Bitmap = ()>> {
    /// Returns the size of the queue in buffers.
    fn size(&self) -> u16;
    /// Pops the next available buffer.
    fn pop<'m>(&mut self, memory: &'m M) -> Option<DescriptorChain<&'m M>>;
    /// Undoes the last [`Self::pop`].
    fn undo_pop(&mut self);
    /// Returns a buffer to the driver; `false` if the guest's used ring is not usable.
    fn add_used(&mut self, memory: &M, head: u16, written: u32) -> bool;
    /// Interrupts the driver.
    fn interrupt(&mut self, memory: &M);
}

/// State of a queue after a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// No buffer was left.
    Done,
    /// Packets wait until the guest provides buffers for resets.
    Waits,
    /// Another turn is due.
    Unfinished,
}

/// Processes the guest's packets.
pub(super) fn transmit<M: GuestMemory<Bitmap = ()>>(
    queue: &mut impl Ring<M>,
    memory: &M,
    mux: &mut Mux,
    payload: &mut [u8],
) -> Turn {
    let mut used = false;
    let mut left = queue.size();
    let turn = loop {
        if left == 0 {
            break Turn::Unfinished;
        }
        if !mux.can_receive() {
            break Turn::Waits;
        }
        let Some(chain) = queue.pop(memory) else {
            break Turn::Done;
        };
        left -= 1;
        let head = chain.head_index();
        match Packet::of(memory, chain, payload) {
            Packet::Whole(header, len) => mux.receive(&header, &payload[..len]),
            Packet::Lost(header) => mux.lose(&header),
            Packet::None => {}
        }
        used |= queue.add_used(memory, head, 0);
    };
    if used {
        queue.interrupt(memory);
    }
    turn
}

/// Writes packets for the guest while it has buffers for them.
pub(super) fn receive<M: GuestMemory<Bitmap = ()>>(
    queue: &mut impl Ring<M>,
    memory: &M,
    mux: &mut Mux,
    payload: &mut [u8],
) -> Turn {
    let mut used = false;
    let mut left = queue.size();
    let turn = loop {
        if !mux.has_packets() {
            break Turn::Done;
        }
        if left == 0 {
            break Turn::Unfinished;
        }
        let Some(chain) = queue.pop(memory) else {
            break Turn::Done;
        };
        left -= 1;
        let head = chain.head_index();
        let written = match Writer::new(memory, chain) {
            Ok(mut writer) if writer.available_bytes() > HEADER_LEN => {
                let room = (writer.available_bytes() - HEADER_LEN).min(payload.len());
                let Some(header) = mux.next_packet(&mut payload[..room]) else {
                    queue.undo_pop();
                    break Turn::Done;
                };
                write_packet(&mut writer, &header, payload)
            }
            // Returns a buffer that cannot hold a packet unused.
            _ => 0,
        };
        used |= queue.add_used(memory, head, written);
    };
    if used {
        queue.interrupt(memory);
    }
    turn
}

/// Contents of a buffer of the transmit queue.
enum Packet {
    /// A packet with as many bytes of payload.
    Whole(Header, usize),
    /// A packet whose payload is too long, or not there in whole, or in no memory of the device's: a driver that sends
    /// without a copy may name memory of the window.
    Lost(Header),
    /// No packet.
    None,
}

impl Packet {
    /// Copies a packet out of guest memory, its payload to the start of `payload`.
    fn of<M: GuestMemory<Bitmap = ()>>(
        memory: &M,
        chain: DescriptorChain<&M>,
        payload: &mut [u8],
    ) -> Self {
        let Some(header) = read_header(memory, chain.clone()) else {
            return Self::None;
        };
        match read_payload(memory, chain, &header, payload) {
            Some(len) => Self::Whole(header, len),
            None => Self::Lost(header),
        }
    }
}

/// Copies the header of a packet, whatever the buffers behind it are; `None` if there is none.
fn read_header<M: GuestMemory<Bitmap = ()>>(
    memory: &M,
    chain: DescriptorChain<&M>,
) -> Option<Header> {
    let mut header = Header::new_zeroed();
    let mut rest = header.as_mut_bytes();
    for buffer in chain.readable() {
        let len = usize::try_from(buffer.len()).ok()?.min(rest.len());
        let (now, later) = rest.split_at_mut(len);
        memory.read_slice(now, buffer.addr()).ok()?;
        rest = later;
        if rest.is_empty() {
            return Some(header);
        }
    }
    None
}

/// Copies the payload of the packet with this header, and returns its length; `None` if it is not there in whole.
fn read_payload<M: GuestMemory<Bitmap = ()>>(
    memory: &M,
    chain: DescriptorChain<&M>,
    header: &Header,
    payload: &mut [u8],
) -> Option<usize> {
    let len = usize::try_from(header.len.get()).ok()?;
    let payload = payload.get_mut(..len)?;
    let mut reader = Reader::new(memory, chain).ok()?;
    reader.read_exact(&mut [0; HEADER_LEN]).ok()?;
    reader.read_exact(payload).ok()?;
    Some(len)
}

/// Writes a packet and returns its size, 0 on failure. The writer must have room for it.
fn write_packet(writer: &mut impl Write, header: &Header, payload: &[u8]) -> u32 {
    let len = usize::try_from(header.len.get()).unwrap_or(0);
    let written = writer
        .write_all(header.as_bytes())
        .and_then(|()| writer.write_all(&payload[..len]));
    match written {
        Ok(()) => u32::try_from(HEADER_LEN + len).unwrap_or(0),
        Err(error) => {
            tracing::debug!(%error, "a receive buffer is not writable");
            0
        }
    }
}
