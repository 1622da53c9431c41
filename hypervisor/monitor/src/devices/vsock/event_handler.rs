//! Moves packets between the virtqueues and the connections, on the device thread.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, RawFd};

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT, Reader, Writer};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::EventFd;
use zerocopy::{FromZeros, IntoBytes};

use super::connection::{Interest, Key};
use super::device::QUEUES;
use super::mux::{Mux, WatchChange};
use super::packet::{HEADER_LEN, Header};
use crate::devices::virtio::{ActiveQueue, Interrupts};

/// Payload bytes that one packet may carry, either way.
const MAX_PAYLOAD: usize = 64 << 10;
const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;

#[derive(Debug)]
struct Active {
    queues: Vec<ActiveQueue>,
    interrupts: Interrupts,
}

/// The device's work. Lives on the event manager's thread.
#[derive(Debug)]
pub struct VsockEngine {
    memory: GuestMemoryMmap,
    mux: Mux,
    kicks: Vec<EventFd>,
    /// Rung by the engine itself when it stopped before everything was done, so that no queue
    /// keeps the thread from the others.
    again: EventFd,
    active: Option<Active>,
    keys: HashMap<RawFd, Key>,
    payload: Vec<u8>,
    /// Packets wait in the transmit queue because of resets that the guest does not take.
    transmit_waits: bool,
}

impl VsockEngine {
    /// An engine that waits for its queues.
    pub fn new(memory: GuestMemoryMmap, mux: Mux) -> std::io::Result<Self> {
        let event = || EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC);
        Ok(Self {
            memory,
            mux,
            kicks: (0..QUEUES).map(|_| event()).collect::<Result<_, _>>()?,
            again: event()?,
            active: None,
            keys: HashMap::new(),
            payload: vec![0; MAX_PAYLOAD],
            transmit_waits: false,
        })
    }

    /// The eventfds that notify the queues.
    pub fn kicks(&self) -> std::io::Result<Vec<EventFd>> {
        self.kicks.iter().map(EventFd::try_clone).collect()
    }

    /// Empties the eventfd `fd`, if it is one of the engine's own.
    fn take_kick(&self, fd: RawFd) -> bool {
        let mut kicks = self.kicks.iter().chain([&self.again]);
        let Some(kick) = kicks.find(|kick| kick.as_raw_fd() == fd) else {
            return false;
        };
        // An empty counter: the event was taken with an earlier one.
        if let Err(error) = kick.read() {
            tracing::trace!(%error, "a vsock eventfd was empty");
        }
        true
    }

    pub(super) fn start(&mut self, queues: Vec<ActiveQueue>, interrupts: Interrupts) {
        self.active = (queues.len() == QUEUES).then_some(Active { queues, interrupts });
        // What was notified before the queues were here is looked at now.
        ring(&self.again);
    }

    /// Drops queues and connections; the caller applies the changes.
    pub(super) fn stop(&mut self) -> Vec<WatchChange> {
        self.active = None;
        self.transmit_waits = false;
        self.keys.clear();
        self.mux.clear();
        self.mux.watch_changes()
    }

    /// Takes the guest's packets, at most a queue full.
    fn transmit(&mut self) {
        let Some(active) = &mut self.active else {
            return;
        };
        let queue = &mut active.queues[TRANSMIT];
        let mut used = false;
        let mut left = queue.queue.size();
        self.transmit_waits = false;
        loop {
            if !self.mux.can_receive() {
                self.transmit_waits = true;
                break;
            }
            let Some(chain) = queue.queue.pop_descriptor_chain(&self.memory) else {
                break;
            };
            let head = chain.head_index();
            if let Some((header, len)) = read_packet(&self.memory, chain, &mut self.payload) {
                self.mux.receive(&header, &self.payload[..len]);
            }
            used |= give_back(&mut queue.queue, &self.memory, head, 0);
            left = left.saturating_sub(1);
            if left == 0 {
                ring(&self.again);
                break;
            }
        }
        if used {
            interrupt(queue, &self.memory, &active.interrupts);
        }
    }

    /// Gives the guest its packets, at most a queue full.
    fn receive(&mut self) {
        let Some(active) = &mut self.active else {
            return;
        };
        let queue = &mut active.queues[RECEIVE];
        let mut used = false;
        let mut left = queue.queue.size();
        while self.mux.has_packets() {
            if left == 0 {
                ring(&self.again);
                break;
            }
            left -= 1;
            let Some(chain) = queue.queue.pop_descriptor_chain(&self.memory) else {
                break;
            };
            let head = chain.head_index();
            let written = match Writer::new(&self.memory, chain) {
                Ok(mut writer) if writer.available_bytes() > HEADER_LEN => {
                    let room = (writer.available_bytes() - HEADER_LEN).min(MAX_PAYLOAD);
                    let Some(header) = self.mux.next_packet(&mut self.payload[..room]) else {
                        queue.queue.go_to_previous_position();
                        break;
                    };
                    write_packet(&mut writer, &header, &self.payload)
                }
                // A buffer that cannot hold a packet goes back empty.
                _ => 0,
            };
            used |= give_back(&mut queue.queue, &self.memory, head, written);
        }
        if used {
            interrupt(queue, &self.memory, &active.interrupts);
        }
        if self.transmit_waits && self.mux.can_receive() {
            ring(&self.again);
        }
    }

    /// Applies changes to what the event manager watches.
    pub(super) fn apply(changes: Vec<WatchChange>, ops: &mut EventOps<'_>) {
        for change in changes {
            let result = match change {
                WatchChange::Add(fd, _, interest) => {
                    ops.add(Events::new_raw(fd, event_set(interest)))
                }
                WatchChange::Modify(fd, interest) => {
                    ops.modify(Events::new_raw(fd, event_set(interest)))
                }
                WatchChange::Remove(fd) => ops.remove(Events::empty_raw(fd)),
                // The connection is dropped, and its socket closed, after it is unwatched.
                WatchChange::Close(connection) if connection.watched.is_some() => {
                    ops.remove(Events::empty_raw(connection.fd()))
                }
                WatchChange::Close(_) => Ok(()),
            };
            if let Err(error) = result {
                tracing::warn!(%error, "cannot change what the vsock device waits for");
            }
        }
    }

    fn sync_watches(&mut self, ops: &mut EventOps<'_>) {
        let changes = self.mux.watch_changes();
        for change in &changes {
            match change {
                WatchChange::Add(fd, key, _) => {
                    self.keys.insert(*fd, *key);
                }
                WatchChange::Remove(fd) => {
                    self.keys.remove(fd);
                }
                // Only a watched connection owns its entry.
                WatchChange::Close(connection) if connection.watched.is_some() => {
                    self.keys.remove(&connection.fd());
                }
                WatchChange::Modify(..) | WatchChange::Close(_) => {}
            }
        }
        Self::apply(changes, ops);
    }
}

impl MutEventSubscriber for VsockEngine {
    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        let fd = events.fd();
        if self.take_kick(fd) {
            self.transmit();
        } else if let Some(key) = self.keys.get(&fd) {
            let set = events.event_set();
            let hung_up = set.intersects(EventSet::HANG_UP | EventSet::ERROR);
            self.mux
                .host_ready(*key, set.contains(EventSet::IN), hung_up);
        }
        self.receive();
        self.sync_watches(ops);
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        for kick in self.kicks.iter().chain([&self.again]) {
            if let Err(error) = ops.add(Events::new(kick, EventSet::IN)) {
                tracing::error!(%error, "the vsock device cannot wait for its queues");
            }
        }
    }
}

fn ring(again: &EventFd) {
    // The counter never fills: it is read to zero each time.
    if let Err(error) = again.write(1) {
        tracing::debug!(%error, "the vsock engine's own eventfd is full");
    }
}

fn event_set(interest: Interest) -> EventSet {
    let mut set = EventSet::empty();
    set.set(EventSet::IN, interest.read);
    set.set(EventSet::OUT, interest.write);
    set
}

/// Copies one packet out of guest memory; `None` if the chain holds none.
fn read_packet(
    memory: &GuestMemoryMmap,
    chain: DescriptorChain<&GuestMemoryMmap>,
    payload: &mut [u8],
) -> Option<(Header, usize)> {
    let mut reader = Reader::new(memory, chain).ok()?;
    let mut header = Header::new_zeroed();
    reader.read_exact(header.as_mut_bytes()).ok()?;
    let len = usize::try_from(header.len.get()).ok()?;
    let payload = payload.get_mut(..len)?;
    reader.read_exact(payload).ok()?;
    Some((header, len))
}

/// Writes a packet and returns its size; the writer has room for it.
fn write_packet(writer: &mut Writer<'_>, header: &Header, payload: &[u8]) -> u32 {
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

/// Returns a buffer to the driver.
fn give_back(queue: &mut Queue, memory: &GuestMemoryMmap, head: u16, written: u32) -> bool {
    queue
        .add_used(memory, head, written)
        .inspect_err(|error| tracing::debug!(%error, "the guest's used ring is not usable"))
        .is_ok()
}

fn interrupt(queue: &mut ActiveQueue, memory: &GuestMemoryMmap, interrupts: &Interrupts) {
    if queue.queue.needs_notification(memory).unwrap_or(true) {
        interrupts.queue_used(queue.vector);
    }
}
