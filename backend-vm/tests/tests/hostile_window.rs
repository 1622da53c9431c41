//! Ten thousand attacks over a live window.
//!
//! Half of the rounds write random bytes over the ring and its header and publish random bytes as a
//! record, half mutate valid records with knowledge of the grammar, and another thread flips bytes
//! meanwhile. Two sessions are attacked at a time. A round counts once the worker has read its
//! record. The supervisor must live, a neighbouring session must compute the right bytes, and every
//! decoder and every reason for refusal must have been reached.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::thread::park_timeout;
use std::time::{Duration, Instant};

use wormhole_api::array::SURFACE_LDST;
use wormhole_api::{
    AddressReserve, AddressReserveReply, ArrayCreate, ContextReset, CuResult, DevicePtr,
    EventCreate, GraphBegin, GreenCreate, GreenDescribe, Items, LaunchKernel, MESSAGES, MemAlloc,
    MemAllocReply, MemCopy, MemCreate, MemFree, MemMap, MemWrite, Message as ApiMessage,
    MipmapCreate, ModuleGetFunction, PoolCreate, StreamCreate, StreamQuery, Synchronize,
};
use wormhole_backend_tests::attack::{Entry, Writer, mutate};
use wormhole_backend_tests::backend::{Backend, wait_until};
use wormhole_backend_tests::grammar::{
    ARRAY, DEVICE_BYTES, MAPPED_BYTES, PTX, Things, existing, grammar,
};
use wormhole_backend_tests::guest::Guest;
use wormhole_backend_tests::messages::{library_load, module_load};
use wormhole_backend_tests::random::Random;
use wormhole_link::counters::Counter;
use wormhole_link::report::SessionReport;
use wormhole_lock::Mutex;
use wormhole_ring::control::Message;
use wormhole_ring::layout::{RING_BYTES, SLOTS, session};
use wormhole_ring::slot::SlotIndex;
use wormhole_ring::status::EndCause;
use wormhole_ring::wait::{Backoff, Step};

const ROUNDS: usize = 10_000;
/// Number of attackers. One alone mostly waits: for workers that start and end, and for processors.
const ATTACKERS: usize = 2;
/// Time for which a round waits until its record is read: flipped bytes may hide it for good.
const ROUND: Duration = Duration::from_millis(20);

/// Creates all objects of an honest program, so that mutated records have objects to name.
fn prepare(guest: &mut Guest) -> Things {
    let arena = guest.arena[0].address;
    guest.arena[0].write(0, PTX.as_bytes());
    let (image, bytes) = (DevicePtr(arena), PTX.len() as u64);
    let things = Things {
        device: guest
            .call(&MemAlloc {
                bytes: DEVICE_BYTES,
            })
            .reply::<MemAllocReply>()
            .address,
        reserved: guest
            .call(&AddressReserve {
                bytes: 2 * MAPPED_BYTES,
                alignment: 0,
                hint: 0,
            })
            .reply::<AddressReserveReply>()
            .address,
        arena,
    };
    let (format, channels, flags) = (1, 1, 0);
    let answers = [
        guest.call(&StreamCreate {
            new: existing(),
            flags: 1,
            priority: 0,
        }),
        guest.call(&EventCreate {
            new: existing(),
            flags: 0,
        }),
        guest.call(&module_load(existing(), image, bytes)),
        guest.call(&library_load(existing(), image, bytes)),
        guest.call(&ModuleGetFunction {
            module: existing(),
            new: existing(),
            name: b"store",
        }),
        guest.call(&ArrayCreate {
            new: existing(),
            extent: [ARRAY[0], ARRAY[1], 0],
            format,
            channels,
            flags: SURFACE_LDST,
        }),
        guest.call(&MipmapCreate {
            new: existing(),
            extent: [64, 64, 0],
            format,
            channels,
            flags,
            levels: 3,
        }),
        guest.call(&PoolCreate {
            new: existing(),
            handle_types: 0,
            most: 0,
        }),
        guest.call(&MemCreate {
            new: existing(),
            bytes: MAPPED_BYTES,
            handle_types: 0,
        }),
        guest.call(&MemMap {
            address: things.reserved,
            memory: existing(),
        }),
        guest.call(&GraphBegin { new: existing() }),
        guest.call(&GreenDescribe { green: 0 }),
        guest.call(&GreenCreate {
            parts: Items::new(&[]),
        }),
    ];
    for answer in answers {
        assert_eq!(answer.status, 0);
    }
    things
}

/// A hostile session and the state of the attack on it.
struct Attack {
    guest: Guest,
    writer: Writer,
    records: Vec<Entry>,
    sequence: u64,
}

impl Attack {
    /// Returns the valid record of a message.
    fn record<M: ApiMessage>(&self) -> Entry {
        let entry = self.records.iter().find(|entry| entry.message == M::ID);
        entry.expect("each message has one").clone()
    }

    fn open(backend: &Mutex<Backend>) -> Self {
        let control = backend.lock().connect();
        let mut guest = control.open();
        let things = prepare(&mut guest);
        let records = grammar(&things, &mut guest);
        let writer = Writer::new(&guest);
        Self {
            guest,
            writer,
            records,
            sequence: 1000,
        }
    }

    fn send(&mut self, entry: &Entry) {
        self.sequence += 1;
        self.writer.write(entry, self.sequence);
        let _ = self.guest.control.send(&Message::Doorbell);
    }

    /// Waits until the record was read, or never will be.
    fn wait_until_read(&mut self) -> Round {
        let end = Instant::now() + ROUND;
        let mut backoff = Backoff::new();
        loop {
            let cause = self.guest.status.load();
            let taken = self.writer.word(session::HEAD) == self.writer.cursor;
            match cause {
                Some(cause) if taken || cause.cause == EndCause::Violation as u32 => {
                    return Round::Ended;
                }
                None if taken => return Round::Taken,
                _ => {}
            }
            if Instant::now() > end {
                return Round::Over;
            }
            // Yielding for ever takes the processor from the worker that reads.
            match backoff.step() {
                Step::Spun => {}
                Step::Yield => std::thread::yield_now(),
                Step::Sleep(time) => std::thread::sleep(time),
            }
        }
    }

    /// Writes random bytes over the header, the slots and the ring.
    fn scatter(&self, random: &Random) {
        for _ in 0..1 + random.below(64) {
            let offset = match random.below(4) {
                0 => random.below(session::SLOT_BASE),
                1 => session::SLOT_BASE + random.below(8192),
                _ => session::RING_BASE + random.below(RING_BYTES),
            };
            // The status word ends the session, and writing it ends the guest's own session only.
            if offset >= 8 {
                self.writer.set_byte(offset, random.byte());
            }
        }
    }

    /// Returns a record of random bytes. One in sixteen is random in everything; the others have
    /// their message's length and a slot, so that the session survives most of them.
    fn noise(&self, random: &Random, round: usize) -> Entry {
        let wild = random.one_in(16);
        let kinds = self.records.len() - usize::from(!random.one_in(20));
        let like = &self.records[random.below(kinds)];
        let length = if wild {
            random.below(2000)
        } else {
            like.body.len()
        };
        Entry {
            message: if wild {
                random.word() >> random.below(16)
            } else {
                like.message
            },
            slot: if wild { random.word() } else { slot_of(round) },
            body: (0..length).map(|_| random.byte()).collect(),
            ..like.clone()
        }
    }
}

/// Outcome of a round.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Round {
    /// The worker consumed the record.
    Taken,
    /// The worker read the record, and ended the session.
    Ended,
    /// The ring is corrupt, so that the record is never read.
    Over,
}

/// Returns the slot of a round. Slots take turns, so that most are free when they are used again.
fn slot_of(round: usize) -> u16 {
    u16::try_from(round % SLOTS).unwrap()
}

/// Flips bytes of the attacked ring, its header and its slots.
struct Flipper {
    segment: Arc<AtomicPtr<u8>>,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
    busy: Arc<AtomicBool>,
}

impl Flipper {
    fn start(seed: u64) -> Self {
        let segment = Arc::new(AtomicPtr::new(std::ptr::null_mut()));
        let stop = Arc::new(AtomicBool::new(false));
        let busy = Arc::new(AtomicBool::new(false));
        let (target, stopped, working) =
            (Arc::clone(&segment), Arc::clone(&stop), Arc::clone(&busy));
        let thread = std::thread::spawn(move || {
            let random = Random::new(seed);
            while !stopped.load(Ordering::SeqCst) {
                std::thread::park();
                random.delay();
                working.store(true, Ordering::SeqCst);
                let base: *mut u8 = target.load(Ordering::SeqCst);
                if !base.is_null() {
                    flip(base, &random);
                }
                working.store(false, Ordering::SeqCst);
            }
        });
        Self {
            segment,
            stop,
            thread: Some(thread),
            busy,
        }
    }

    /// Lets the thread flip a byte soon.
    fn flip(&self) {
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }

    fn aim(&self, guest: Option<&Guest>) {
        let base = guest.map_or(std::ptr::null_mut(), |guest| guest.segment);
        self.segment.store(base, Ordering::SeqCst);
        if base.is_null() {
            // Wait for the thread, because the segment is going to be unmapped.
            while self.busy.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
        }
    }
}

/// Flips a byte of the record that is being read, now and then one of the header.
fn flip(base: *mut u8, random: &Random) {
    // SAFETY: the segment is mapped while it is aimed at; every access is volatile.
    unsafe {
        let head = base.add(session::HEAD).cast::<u64>().read_volatile();
        let offset = if random.one_in(50) {
            random.below(session::FENCE_BASE)
        } else {
            let near = usize::try_from(head).unwrap_or(0) + 8 + random.below(192);
            session::RING_BASE + (near & (RING_BYTES - 1))
        };
        let byte = base.add(offset);
        byte.write_volatile(byte.read_volatile() ^ 1 << random.below(8));
    }
}

impl Drop for Flipper {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.flip();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Runs an honest session's work in a loop, and checks every byte.
fn neighbour(mut guest: Guest, stop: &AtomicBool, checked: &AtomicU64) {
    let random = Random::new(3);
    while !stop.load(Ordering::Relaxed) {
        let bytes: Vec<u8> = (0..20_000).map(|_| random.byte()).collect();
        let device = guest.round_trip(&bytes);
        assert_eq!(guest.call(&MemFree { address: device }).status, 0);
        checked.fetch_add(1, Ordering::Relaxed);
        // The attacks need the processors.
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Sums of all sessions' reports.
#[derive(Default)]
struct Tally {
    sessions: usize,
    messages: BTreeMap<String, u64>,
    refusals: BTreeMap<String, u64>,
}

impl Tally {
    fn add(&mut self, report: SessionReport) {
        self.sessions += 1;
        for (name, count) in report.messages {
            *self.messages.entry(name).or_default() += count;
        }
        for (reason, count) in report.refusals {
            *self.refusals.entry(reason).or_default() += count;
        }
    }
}

/// Sends a record that causes this refusal, because chance need not find it.
fn directed(attack: &mut Attack, reason: Counter) {
    let copy = attack.record::<MemCopy>();
    let entry = match reason {
        Counter::InvalidHandles => Entry {
            // A stream handle with a generation that never existed.
            body: (1u64 << 38 | 77 << 18 | 5 << 6).to_le_bytes().to_vec(),
            slot: 1,
            ..attack.record::<StreamQuery>()
        },
        Counter::NoDevice => Entry {
            slot: 1,
            device: 2,
            ..attack.record::<StreamQuery>()
        },
        Counter::InvalidAddresses => {
            let mut entry = copy;
            entry.body[..8].copy_from_slice(&12345u64.to_le_bytes());
            Entry { slot: 1, ..entry }
        }
        Counter::RingCommit => Entry {
            units: Some(0xF000),
            ..copy
        },
        Counter::RingLap => Entry {
            lap: Some(77),
            ..copy
        },
        Counter::RingOverrun => Entry { pad: true, ..copy },
        Counter::RingBody => Entry {
            body_len: Some(5000),
            ..copy
        },
        Counter::RingSlot => Entry { slot: 200, ..copy },
        Counter::RingTail => {
            // Checked when the executor parks, which it does again after a doorbell.
            attack.writer.set_word(session::TAIL, 3);
            let _ = attack.guest.control.send(&Message::Doorbell);
            return;
        }
        Counter::UnknownMessage => Entry {
            message: 999,
            ..copy
        },
        Counter::ShortBody => Entry {
            body: vec![0; 5],
            ..copy
        },
        Counter::LongBody => {
            let mut entry = copy;
            entry.body.extend([0; 8]);
            entry
        }
        Counter::CountAboveLimit | Counter::CountAboveBody => {
            // Count of the data of a MemWrite.
            let mut entry = attack.record::<MemWrite>();
            let count = 100u32.to_le_bytes();
            let at = entry
                .body
                .windows(4)
                .position(|bytes| bytes == count)
                .expect("the count of 100");
            let wrong: u32 = match reason {
                Counter::CountAboveLimit => 5000,
                _ => 101,
            };
            entry.body[at..at + 4].copy_from_slice(&wrong.to_le_bytes());
            entry
        }
        Counter::HandleType => Entry {
            body: (2u64 << 38).to_le_bytes().to_vec(),
            slot: 1,
            ..attack.record::<StreamQuery>()
        },
        Counter::ExcludedValue => {
            // Grid of 0 in the launch.
            let mut entry = attack.record::<LaunchKernel>();
            let block = [32, 0, 0, 0, 1, 0, 0, 0];
            let at = entry
                .body
                .windows(8)
                .position(|bytes| bytes == block)
                .expect("the block of 32");
            entry.body[at] = 0;
            Entry { slot: 1, ..entry }
        }
        Counter::SlotBusy => {
            // A second request on a slot whose first is in a job thread: the reset holds the answer
            // back.
            let reset = Entry {
                slot: 2,
                ..attack.record::<Synchronize>()
            };
            for _ in 0..200 {
                attack.send(&reset);
            }
            return;
        }
        Counter::NoSlot => Entry {
            slot: 0xFFFF,
            ..attack.record::<Synchronize>()
        },
        other => panic!("{other:?} is no reason for refusal"),
    };
    attack.send(&entry);
}

/// Returns the next report of an ended session. Others use the tenant's stream meanwhile.
fn report(backend: &Mutex<Backend>) -> SessionReport {
    let mut next = None;
    wait_until(
        || {
            next = backend.lock().ready_report();
            if next.is_none() {
                park_timeout(Duration::from_millis(1));
            }
            next.is_some()
        },
        || "the report of a session".into(),
    );
    next.expect("waited for")
}

/// Attacks one session after the other until enough rounds were looked at. Returns the number of all rounds.
fn attack_at_random(backend: &Mutex<Backend>, tally: &Mutex<Tally>, number: u64) -> usize {
    let random = Random::new(2026 + number);
    let flipper = Flipper::start(99 + number);
    let mut attack: Option<Attack> = None;
    let (mut looked_at, mut round) = (0, 0);
    while looked_at < ROUNDS / ATTACKERS {
        let live = attack.get_or_insert_with(|| Attack::open(backend));
        flipper.aim(Some(&live.guest));
        round += 1;
        let entry = if round % 2 == 0 {
            live.scatter(&random);
            live.noise(&random, round)
        } else {
            // The reset at the end of the grammar destroys the objects that the others need.
            let kinds = live.records.len() - usize::from(!random.one_in(20));
            let mut entry = live.records[random.below(kinds)].clone();
            // A record without a slot that fails ends its session.
            if SlotIndex::new(entry.slot).is_some() || !random.one_in(4) {
                entry.slot = slot_of(round);
            }
            if random.one_in(4) {
                entry.device = 1;
            }
            if !random.one_in(4) {
                mutate(&mut entry, &random);
            }
            entry
        };
        // More flips would end every session within a few rounds, and a session takes as long as fifty rounds.
        if random.one_in(16) {
            flipper.flip();
        }
        live.send(&entry);
        let outcome = live.wait_until_read();
        looked_at += usize::from(outcome != Round::Over);
        if outcome != Round::Taken {
            flipper.aim(None);
            attack = None;
            let report = report(backend);
            tally.lock().add(report);
        }
    }
    flipper.aim(None);
    round
}

/// Messages whose record fails: it names an object or a file of another process, or a feature that the CPU device lacks.
const NOT_SERVED: [&str; 11] = [
    "OpenAllocation",
    "CloseAllocation",
    "OpenEvent",
    "OpenMemory",
    "OpenPool",
    "OpenPointer",
    "FileMap",
    "FileMemoryMap",
    "FileUnmap",
    "TensorMapEncode",
    "TensorMapReplace",
];

/// Checks the unmodified records, because mutations of invalid ones test little.
#[test]
fn every_message_has_a_valid_record() {
    let backend = Mutex::new(Backend::with_devices(16, "cpu:2"));
    let mut attack = Attack::open(&backend);
    let mut served = BTreeSet::new();
    for entry in attack.records.clone() {
        attack.send(&Entry { slot: 1, ..entry });
        let answer = attack.guest.wait(1, attack.sequence);
        let status = answer.expect("the session lives").status;
        if status == 0 || status == CuResult::NOT_READY.0 {
            served.insert(entry.message);
        }
    }
    assert_eq!(attack.guest.status.load(), None);
    for info in MESSAGES {
        let expected = !NOT_SERVED.contains(&info.name);
        assert_eq!(served.contains(&info.id), expected, "{}", info.name);
    }
}

#[test]
fn ten_thousand_attacks_end_nothing_but_their_own_sessions() {
    let backend = Mutex::new(Backend::with_devices(128, "cpu:2"));
    let stop = Arc::new(AtomicBool::new(false));
    let checked = Arc::new(AtomicU64::new(0));
    let honest = backend.lock().connect().open();
    let beside = {
        let (stop, checked) = (Arc::clone(&stop), Arc::clone(&checked));
        std::thread::spawn(move || neighbour(honest, &stop, &checked))
    };
    let mut tally = Tally::default();

    for &(reason, name) in Counter::REFUSALS {
        let mut attack = Attack::open(&backend);
        directed(&mut attack, reason);
        match reason {
            Counter::InvalidHandles
            | Counter::InvalidAddresses
            | Counter::HandleType
            | Counter::ExcludedValue
            | Counter::NoDevice => drop(attack.guest.wait(1, attack.sequence)),
            _ => drop(attack.guest.wait_for_status()),
        }
        drop(attack);
        let report = report(&backend);
        assert!(
            report.refusals.contains_key(name),
            "{name} was not reached: {report:?}"
        );
        tally.add(report);
    }

    // The reset is also sent on purpose: it is rare at random, because it destroys the objects that
    // the others need.
    let mut attack = Attack::open(&backend);
    let reset = Entry {
        slot: 1,
        ..attack.record::<ContextReset>()
    };
    attack.send(&reset);
    let answer = attack.guest.wait(1, attack.sequence);
    assert_eq!(answer.expect("the session lives").status, 0);
    drop(attack);
    tally.add(report(&backend));

    let tally = Mutex::new(tally);
    let rounds: usize = std::thread::scope(|scope| {
        let (backend, tally) = (&backend, &tally);
        let attackers: [_; ATTACKERS] = std::array::from_fn(|number| {
            scope.spawn(move || attack_at_random(backend, tally, number as u64))
        });
        let rounds = attackers.map(|attacker| attacker.join().expect("it attacks"));
        rounds.iter().sum()
    });

    let before = checked.load(Ordering::Relaxed);
    wait_until(
        || checked.load(Ordering::Relaxed) > before || beside.is_finished(),
        || "the neighbour's next result".into(),
    );
    stop.store(true, Ordering::Relaxed);
    beside.join().expect("the neighbour's results are right");
    assert!(backend.lock().is_alive());
    let tally = tally.lock();
    println!(
        "{rounds} rounds, {} sessions attacked, neighbour checked {} times",
        tally.sessions,
        checked.load(Ordering::Relaxed)
    );
    println!("messages {:?}", tally.messages);
    println!("refusals {:?}", tally.refusals);
    for info in MESSAGES {
        assert!(
            tally.messages.contains_key(info.name),
            "{} was not reached",
            info.name
        );
    }
    for (_, name) in Counter::REFUSALS {
        assert!(tally.refusals.contains_key(*name), "{name} was not reached");
    }
}
