//! A ring with its executor and the test's device, in one process.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use wormhole_api::handle::{HandleKind, Key};
use wormhole_api::{Handle, Items, LaunchAttribute, LaunchKernel, Message};
use wormhole_device::Device;
use wormhole_link::counters::{Counters, CountersFile};
use wormhole_link::neighbours::{Neighbours, NeighboursFile};
use wormhole_ring::memory::{OwnedMemory, SessionMemory};
use wormhole_ring::ring::{Producer, PushError, RecordHead};
use wormhole_ring::slot::{AnswerSlots, SlotIndex};
use wormhole_ring::status::Status;
use wormhole_worker::Tuning;
use wormhole_worker::devices::Devices;
use wormhole_worker::exchange::Exchange;
use wormhole_worker::registrar::{Registrar, Registrations};
use wormhole_worker::session::Event;
use wormhole_worker::wake;
use wormhole_worker::wake::Notifier;

use wormhole_backend_tests::backend::PATIENCE;
use wormhole_backend_tests::random::Random;

/// Returns the handle that a guest mints first at an index.
pub fn handle<K: HandleKind>(index: u32) -> Handle<K> {
    Handle::new(Key {
        index,
        generation: 1,
    })
    .unwrap()
}

/// Returns the launch of one block of one thread of the first function on the first stream.
pub fn launch_with(attributes: &[LaunchAttribute]) -> LaunchKernel<'_> {
    LaunchKernel {
        function: handle(1),
        stream: handle(1),
        grid: [1; 3],
        block: [1; 3],
        shared: 0,
        attributes: Items::new(attributes),
        parameters: &[0; 8],
    }
}

/// One ring with its executor, which runs on a thread of its own.
pub struct Served {
    pub producer: Producer,
    pub slots: AnswerSlots,
    pub status: Status,
    session: SessionMemory,
    pub counters: CountersFile,
    pub neighbours: NeighboursFile,
    /// Sends events of other threads to the executor.
    pub notifier: Notifier<Event>,
    stop: Arc<AtomicBool>,
    /// While true, the executor's thread does nothing, as if it slept.
    pub rests: Arc<AtomicBool>,
    /// Number of looks of the resting thread, and of those that found no fence outstanding.
    pub looks: Arc<[AtomicU64; 2]>,
    executor: Option<std::thread::JoinHandle<()>>,
    // Dropped last: everything above points into it.
    _memory: OwnedMemory,
}

impl Served {
    pub fn start(device: &Arc<dyn Device>, seed: u64) -> Self {
        Self::start_on(vec![Arc::clone(device)], seed)
    }

    /// Starts an executor that serves several devices.
    pub fn start_on(devices: Vec<Arc<dyn Device>>, seed: u64) -> Self {
        Self::start_tuned(devices, seed, Tuning::default())
    }

    /// Starts an executor whose launches may go to lanes and into chains.
    pub fn start_tuned(devices: Vec<Arc<dyn Device>>, seed: u64, tuning: Tuning) -> Self {
        Self::start_sharing(devices, seed, tuning, Exchange::none())
    }

    /// Starts an executor that shares objects by an exchange.
    pub fn start_sharing(
        devices: Vec<Arc<dyn Device>>,
        seed: u64,
        tuning: Tuning,
        exchange: Exchange,
    ) -> Self {
        let devices = Devices::new(devices);
        let memory = OwnedMemory::segments(1);
        // SAFETY: the executor's thread ends before the memory is dropped.
        let session = unsafe { memory.session(0) }.unwrap();
        let counters = CountersFile::create().unwrap();
        let page = OwnedFd::from(counters.file().try_clone().unwrap());
        let (notifier, inbox) = wake::inbox().unwrap();
        let neighbours = NeighboursFile::create().unwrap();
        let word = Neighbours::map(&neighbours.descriptor().unwrap()).unwrap();
        let own = Counters::map(&page, word).unwrap();
        let registrations = Registrations::new(devices.clone());
        let registrar = Registrar::start(registrations, own.progress()).unwrap();
        let sender = notifier.clone();
        let mut executor = wormhole_worker::executor(
            &devices,
            &session,
            session.base() as u64,
            own,
            sender,
            inbox,
            registrar,
        )
        .unwrap()
        .launching_in_lanes(tuning.lanes)
        .launching_in_chains(tuning.chains)
        .sharing_by(exchange);
        let stop = Arc::new(AtomicBool::new(false));
        let rests = Arc::new(AtomicBool::new(false));
        let looks = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
        let (stopped, resting) = (Arc::clone(&stop), Arc::clone(&rests));
        let counted = Arc::clone(&looks);
        let random = Random::new(seed);
        let executor = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                random.delay();
                if resting.load(Ordering::Relaxed) {
                    let idle = !executor.session().expects_fences();
                    counted[0].fetch_add(1, Ordering::Relaxed);
                    counted[1].fetch_add(u64::from(idle), Ordering::Relaxed);
                    std::thread::yield_now();
                    continue;
                }
                if !executor.turn().expect("honest records") {
                    std::thread::yield_now();
                }
            }
        });
        // SAFETY: one executor consumes; each thread polls a slot of its own.
        let (producer, slots) = unsafe {
            (
                Producer::new(session.clone()),
                AnswerSlots::new(session.clone()),
            )
        };
        Self {
            producer,
            slots,
            status: Status::new(session.clone()),
            session,
            counters,
            neighbours,
            notifier,
            stop,
            rests,
            looks,
            executor: Some(executor),
            _memory: memory,
        }
    }

    pub fn memory(&self) -> SessionMemory {
        self.session.clone()
    }

    pub fn record<M: Message>(&self, message: &M) {
        record(&self.producer, message);
    }

    /// Sends a request for a device in slot 0, and returns its result and payload.
    pub fn on<M: Message>(&self, device: u16, sequence: u64, message: &M) -> (u32, Vec<u8>) {
        let head = RecordHead::request(M::ID, index(0), sequence);
        send(&self.producer, head.on(device), message);
        self.answer(0, sequence)
    }

    /// Sends a record for a device.
    pub fn record_on<M: Message>(&self, device: u16, message: &M) {
        send(
            &self.producer,
            RecordHead::record(M::ID).on(device),
            message,
        );
    }

    /// Sends a record of a thread of the guest.
    pub fn record_by<M: Message>(&self, thread: u16, message: &M) {
        send(
            &self.producer,
            RecordHead::record(M::ID).by(thread),
            message,
        );
    }

    /// Sends a request without waiting for its answer.
    pub fn ask<M: Message>(&self, slot: u32, sequence: u64, message: &M) {
        ask(&self.producer, slot, sequence, message);
    }

    /// Waits for the answer to a request, and returns its result and payload.
    pub fn answer(&self, slot: u32, sequence: u64) -> (u32, Vec<u8>) {
        let slot = index(slot);
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(answer) = self.slots.poll(slot, sequence).unwrap() {
                let mut payload = vec![0; answer.length];
                self.slots.copy_payload(slot, 0, &mut payload);
                return (answer.status, payload);
            }
            assert!(Instant::now() < end, "waited in vain for an answer");
            std::thread::yield_now();
        }
    }

    pub fn has_answer(&self, slot: u32, sequence: u64) -> bool {
        self.slots.poll(index(slot), sequence).unwrap().is_some()
    }

    /// Returns the payload of the answer to a request that must succeed.
    pub fn payload<M: Message>(&self, slot: u32, sequence: u64) -> Vec<u8> {
        let (status, payload) = self.answer(slot, sequence);
        assert_eq!(status, 0, "{}", M::NAME);
        payload
    }

    pub fn call<M: Message>(&self, slot: u32, sequence: u64, message: &M) -> Vec<u8> {
        self.ask(slot, sequence, message);
        self.payload::<M>(slot, sequence)
    }
}

/// Writes to a ring, waiting for room.
pub fn push(ring: &Producer, head: RecordHead, parts: &[&[u8]]) {
    loop {
        match ring.push(head, parts) {
            Ok(()) => return,
            Err(PushError::Full { .. }) => std::thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
    }
}

fn send<M: Message>(ring: &Producer, head: RecordHead, message: &M) {
    message.encode(|parts| push(ring, head, parts)).unwrap();
}

pub fn record<M: Message>(ring: &Producer, message: &M) {
    send(ring, RecordHead::record(M::ID), message);
}

/// Sends a request without waiting for its answer.
pub fn ask<M: Message>(ring: &Producer, slot: u32, sequence: u64, message: &M) {
    send(
        ring,
        RecordHead::request(M::ID, index(slot), sequence),
        message,
    );
}

fn index(slot: u32) -> SlotIndex {
    SlotIndex::new(u16::try_from(slot).unwrap()).unwrap()
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(executor) = self.executor.take() {
            let _ = executor.join();
        }
    }
}
