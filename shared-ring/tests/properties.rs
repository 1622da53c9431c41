//! Properties that hold for all inputs.
//!
//! Miri does not run these tests: the tested code has no unsafe block, or `ring.rs` tests it too.

#![cfg(not(any(loom, miri)))]

use std::collections::BTreeMap;

use proptest::prelude::*;
use wormhole_ring::{
    arena::{Arena, ArenaError, GRANULE, PAGE},
    control::{
        ArenaDenied, ArenaRequest, ArenaRun, ArenaWithin, Attach, Band, ControlError, Exits, Fetch,
        Fetched, Grant, HEADER_BYTES, Header, MAX_CONTROL_BODY, Message, Observe, ProcessNumber,
        Share, Shared, Stream, WindowRun,
    },
    layout::{MAX_BODY, SEGMENT_BYTES},
    memory::OwnedMemory,
    ring::{Consumer, Producer, RecordBuf, RecordHead},
    session::{GrantError, Owner, Run, SegmentTable, SessionId},
    slot::SlotIndex,
};

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

fn heads() -> impl Strategy<Value = RecordHead> {
    let slots = prop_oneof![Just(None), (0_u16..128).prop_map(SlotIndex::new)];
    (any::<[u16; 3]>(), slots, any::<u64>()).prop_map(
        |([message, thread, device], slot, sequence)| RecordHead {
            message,
            thread,
            slot,
            device,
            sequence,
        },
    )
}

proptest! {
    #![proptest_config(config(256))]

    #[test]
    fn what_is_pushed_is_what_is_taken(
        records in prop::collection::vec(
            (heads(), 0..=MAX_BODY, any::<u8>(), any::<usize>()),
            1..20,
        ),
        laps in 0_usize..200,
    ) {
        let region = OwnedMemory::segments(1);
        // SAFETY: the region outlives both sides; there is one consumer.
        let (producer, mut consumer) = unsafe {
            let session = region.session(0).unwrap();
            (Producer::new(session.clone()), Consumer::new(session))
        };
        let mut buf = RecordBuf::new();
        for _ in 0..laps {
            producer.push(RecordHead::record(0), &[&[0xFF; MAX_BODY - 3]]).unwrap();
            consumer.take(&mut buf).unwrap().unwrap();
        }
        // Bytes that differ from their neighbours and from other records'.
        let body = |length: usize, seed: u8| -> Vec<u8> {
            (0..length).zip((0..=250).cycle()).map(|(_, byte): (_, u8)| byte ^ seed).collect()
        };
        for &(head, length, seed, cut) in &records {
            let body = body(length, seed);
            let (one, two) = body.split_at(cut % (body.len() + 1));
            producer.push(head, &[one, two]).unwrap();
        }
        for &(head, length, seed, _) in &records {
            prop_assert_eq!(consumer.take(&mut buf).unwrap(), Some(head));
            prop_assert_eq!(buf.body(), &body(length, seed)[..]);
        }
        prop_assert_eq!(consumer.take(&mut buf), Ok(None));
    }
}

fn runs() -> impl Strategy<Value = ArenaRun> {
    any::<[u32; 3]>().prop_map(|[id, first, count]| ArenaRun { id, first, count })
}

fn grants() -> impl Strategy<Value = Grant> {
    (any::<[u32; 5]>(), any::<[u64; 9]>()).prop_map(|(small, large)| Grant {
        session: small[0],
        generation: small[1],
        session_segment: small[2],
        arena_first: small[3],
        arena_count: small[4],
        reserved: 0,
        window_base: large[0],
        window_size: large[1],
        handle_base: large[2],
        apertures: [
            Band {
                base: large[3],
                size: large[4],
            },
            Band {
                base: large[5],
                size: large[6],
            },
        ],
        protocol_hash: large[7],
        features: large[8],
    })
}

/// Encodes and decodes a message, and compares.
fn round_trip(message: &Message<'_>) -> Result<(), TestCaseError> {
    let frame = message.to_vec().unwrap();
    let (header, body) = frame.split_first_chunk::<HEADER_BYTES>().unwrap();
    let header = Header::decode(header).unwrap();
    prop_assert_eq!(
        header,
        Header {
            kind: message.kind(),
            body_len: body.len()
        }
    );
    prop_assert_eq!(&Message::decode(header.kind, body).unwrap(), message);
    // One byte more or less is another message, except to a text without a length of its own.
    if !matches!(message, Message::SessionReport(_)) {
        let mut longer = body.to_vec();
        longer.push(b'x');
        for wrong in [
            Some(&longer[..]),
            body.len().checked_sub(1).map(|end| &body[..end]),
        ] {
            let Some(wrong) = wrong else { continue };
            let refused = Message::decode(header.kind, wrong);
            let named = matches!(
                refused,
                Err(ControlError::Length { message: name, length, .. })
                    if name == message.name() && length == wrong.len()
            );
            prop_assert!(named, "{:?}", refused);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(config(256))]

    #[test]
    fn a_control_message_survives_its_encoding(
        text in "\\PC{0,300}",
        run in runs(),
        grant in grants(),
        small in any::<[u32; 2]>(),
        large in any::<[u64; 2]>(),
    ) {
        let shown = WindowRun { session: run.id, first: run.first, count: run.count };
        let messages = [
            Message::Hello {
                bootstrap_version: small[0],
                protocol_hash: large[0],
                features: large[1],
                environment: &text,
            },
            Message::Mapped,
            Message::Unmappable,
            Message::ArenaRequest(ArenaRequest { id: small[0], segments: small[1] }),
            Message::ArenaWithin(ArenaWithin {
                id: small[0],
                segments: small[1],
                first: run.first,
                end: run.count,
            }),
            Message::ArenaReturn(run),
            Message::Doorbell,
            Message::Process(ProcessNumber { pid: small[0], reserved: small[1] }),
            Message::Observe(Observe { bootstrap_version: small[0], device: small[1] }),
            Message::Observation { device: small[0], devices: small[1], more: run.id, facts: &text },
            Message::Grant(grant),
            Message::Refused { code: small[0], reason: &text },
            Message::ArenaGrant(run),
            Message::ArenaDenied(ArenaDenied { id: small[0], code: small[1], limit: large[0] }),
            Message::Attach(Attach {
                window_size: large[0],
                segment_limit: small[0],
                session_limit: small[1],
                device_memory_limit: large[1],
                static_window: large[0],
            }),
            Message::Stream(Stream { local: small[0] }),
            Message::SessionReport(&text),
            Message::AskUsage,
            Message::Usage { more: small[0], tenants: &text },
            Message::AskExits,
            Message::Exits(Exits { is_known: large[0], count: large[1] }),
            Message::WindowMap(shown),
            Message::WindowMapped(shown),
            Message::WindowUnmap(shown),
            Message::Assign(grant),
            Message::Assigned,
            Message::Dump,
            Message::ArenaAdd(run),
            Message::ArenaAdded(run),
            Message::ArenaRemove(run),
            Message::ArenaRemoved(run),
            Message::ArenaRefused(run),
            Message::Share(Share {
                id: small[0],
                what: small[1],
                descriptor: 1,
                words: 0,
                description: [large[1]; 8],
            }),
            Message::Shared(Shared { id: small[0], result: small[1], token: large }),
            Message::Fetch(Fetch { id: small[0], what: small[1], token: large }),
            Message::Fetched(Fetched {
                id: small[0],
                result: small[1],
                descriptor: 1,
                party: small[0],
                description: [large[0]; 8],
            }),
            Message::Unshare(Fetch { id: 0, what: small[1], token: large }),
            Message::Ready { protocol_hash: large[0], device: &text },
        ];
        for message in &messages {
            round_trip(message)?;
        }
    }

    #[test]
    fn any_bytes_give_a_message_or_an_error(
        kind in 0_u16..64,
        body in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        if let Ok(message) = Message::decode(kind, &body) {
            prop_assert_eq!(message.kind(), kind);
            let frame = message.to_vec().unwrap();
            prop_assert_eq!(Message::decode(kind, &frame[HEADER_BYTES..]).unwrap(), message);
        }
    }

    #[test]
    fn a_header_that_decodes_is_within_the_limit(bytes in any::<[u8; 12]>()) {
        let mut header = [0; HEADER_BYTES];
        header[..4].copy_from_slice(b"WHC1");
        header[4..].copy_from_slice(&bytes);
        if let Ok(header) = Header::decode(&header) {
            prop_assert!(header.body_len <= MAX_CONTROL_BODY);
        }
    }
}

#[derive(Clone, Debug)]
enum ArenaStep {
    Allocate { bytes: u64, align: u64 },
    Free(prop::sample::Index),
    AddExtent,
}

fn arena_steps() -> impl Strategy<Value = ArenaStep> {
    let sizes = prop_oneof![1_u64..600, 1_u64..10_000, 1_u64..3_000_000];
    prop_oneof![
        6 => (sizes, 0_u32..14).prop_map(|(bytes, align)| ArenaStep::Allocate {
            bytes,
            align: 1 << align,
        }),
        5 => any::<prop::sample::Index>().prop_map(ArenaStep::Free),
        1 => Just(ArenaStep::AddExtent),
    ]
}

/// Checks that allocations and free ranges cover the extents exactly, and that free neighbours are
/// merged.
fn check_cover(arena: &Arena, extents: &BTreeMap<u64, u64>) -> Result<(), TestCaseError> {
    let free: Vec<_> = arena.free_ranges().collect();
    let mut pieces: Vec<_> = arena.allocations().map(|block| (block, false)).collect();
    pieces.extend(free.iter().map(|&block| (block, true)));
    pieces.sort();
    let mut pieces = pieces.into_iter().peekable();
    for (&start, &bytes) in extents {
        let (mut at, mut before_is_free) = (start, false);
        while at < start + bytes {
            let (block, is_free) = pieces.next().unwrap();
            prop_assert_eq!(block.address, at, "a gap or an overlap");
            prop_assert!(
                !(is_free && before_is_free),
                "two free neighbours at {:#x}",
                at
            );
            (at, before_is_free) = (block.end(), is_free);
        }
        prop_assert_eq!(at, start + bytes, "an allocation crosses an extent");
    }
    prop_assert!(pieces.next().is_none());
    Ok(())
}

proptest! {
    #![proptest_config(config(256))]

    #[test]
    fn allocations_never_overlap_and_free_ranges_always_join(
        steps in prop::collection::vec(arena_steps(), 1..120),
    ) {
        const EXTENT: u64 = SEGMENT_BYTES as u64;
        let base = 0x5000_0020_0000;
        let mut arena = Arena::new();
        let mut extents = BTreeMap::from([(base, EXTENT)]);
        arena.add_extent(base, EXTENT).unwrap();
        let mut live = Vec::new();
        for step in steps {
            match step {
                ArenaStep::Allocate { bytes, align } => match arena.allocate(bytes, align) {
                    Ok(block) => {
                        let granule = if bytes >= PAGE { PAGE } else { GRANULE };
                        prop_assert!(block.bytes >= bytes && block.bytes - bytes < granule);
                        prop_assert!(block.address.is_multiple_of(align.max(granule)));
                        prop_assert_eq!(arena.find(block.end() - 1), Some(block));
                        live.push(block);
                    }
                    Err(ArenaError::NoRoom { bytes, align, .. }) => {
                        let fits = arena.free_ranges().any(|range| {
                            range.address.next_multiple_of(align) + bytes <= range.end()
                        });
                        prop_assert!(!fits, "there was room for {} bytes", bytes);
                    }
                    Err(error) => prop_assert!(false, "{}", error),
                },
                ArenaStep::Free(index) if !live.is_empty() => {
                    let block = live.swap_remove(index.index(live.len()));
                    let freed = arena.free(block.address).unwrap();
                    prop_assert_eq!(freed.block, block);
                    let extent = arena.extent(block.address).unwrap();
                    let inside = |b: &wormhole_ring::arena::Block| {
                        (extent.address..extent.end()).contains(&b.address)
                    };
                    let empty = !live.iter().any(inside);
                    prop_assert_eq!(freed.empty_extent, empty.then_some(extent));
                    prop_assert_eq!(arena.find(block.address), None);
                    prop_assert!(arena.free(block.address).is_err(), "freed twice");
                }
                ArenaStep::Free(_) => {}
                ArenaStep::AddExtent => {
                    let start = base + extents.len() as u64 * EXTENT;
                    prop_assert!(arena.add_extent(start - PAGE, EXTENT).is_err());
                    arena.add_extent(start, EXTENT).unwrap();
                    extents.insert(start, EXTENT);
                }
            }
            check_cover(&arena, &extents)?;
        }
        for block in live.drain(..) {
            arena.free(block.address).unwrap();
        }
        for &start in extents.keys() {
            arena.remove_extent(start).unwrap();
        }
        prop_assert_eq!((arena.capacity(), arena.used()), (0, 0));
        prop_assert_eq!(arena.free_ranges().count(), 0);
    }
}

#[derive(Clone, Debug)]
enum TableStep {
    Grant {
        session: u32,
        count: u32,
    },
    GrantWithin {
        session: u32,
        count: u32,
        part: (u32, u32),
    },
    TakeBack {
        session: u32,
        run: Run,
    },
    TakeBackAll(u32),
    Scrub {
        session: u32,
        run: Run,
    },
}

fn table_steps() -> impl Strategy<Value = TableStep> {
    let runs = || (0_u32..34, 0_u32..6).prop_map(|(first, count)| Run { first, count });
    prop_oneof![
        4 => (0_u32..3, 0_u32..9).prop_map(|(session, count)| TableStep::Grant { session, count }),
        3 => (0_u32..3, 0_u32..9, (0_u32..40, 0_u32..40)).prop_map(|(session, count, part)| {
            TableStep::GrantWithin { session, count, part }
        }),
        3 => (0_u32..3, runs()).prop_map(|(session, run)| TableStep::TakeBack { session, run }),
        1 => (0_u32..3).prop_map(TableStep::TakeBackAll),
        3 => (0_u32..3, runs()).prop_map(|(session, run)| TableStep::Scrub { session, run }),
    ]
}

/// Returns the runs of segments with an owner by a look at each segment.
fn runs_of(owners: &[Owner], owner: Owner) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (segment, _) in (0..).zip(owners).filter(|(_, one)| **one == owner) {
        match runs.last_mut() {
            Some(run) if run.first + run.count == segment => run.count += 1,
            _ => runs.push(Run {
                first: segment,
                count: 1,
            }),
        }
    }
    runs
}

proptest! {
    #![proptest_config(config(512))]

    #[test]
    fn a_segment_has_one_owner_who_alone_can_give_it_back(
        steps in prop::collection::vec(table_steps(), 1..60),
    ) {
        const SEGMENTS: u32 = 32;
        const LIMIT: u32 = 24;
        let id = |index| SessionId { index, generation: 1 };
        let mut table = SegmentTable::new(SEGMENTS, LIMIT);
        let mut model = [Owner::Free; SEGMENTS as usize];
        model[0] = Owner::Reserved;
        let all_are = |model: &[Owner], run: Run, owner| {
            run.count > 0
                && run.first + run.count <= SEGMENTS
                && (run.first..run.first + run.count).all(|s| model[s as usize] == owner)
        };
        for step in steps {
            match step {
                TableStep::Grant { session, count } => {
                    let before = runs_of(&model, Owner::Free);
                    let held = table.held();
                    let wanted = before.iter().filter(|run| run.count >= count);
                    let wanted = wanted.min_by_key(|run| (run.count, run.first));
                    let longest = before.iter().map(|run| run.count).max().unwrap_or(0);
                    let session = id(session);
                    let due = match wanted {
                        _ if count == 0 => Err(GrantError::Empty { session }),
                        _ if held + count > LIMIT => {
                            Err(GrantError::Quota { session, count, held, limit: LIMIT })
                        }
                        Some(run) => Ok(Run { count, ..*run }),
                        None => Err(GrantError::NoRun { session, count, longest }),
                    };
                    prop_assert_eq!(table.grant(session, count), due);
                    if let Ok(run) = due {
                        let segments = run.first as usize..(run.first + run.count) as usize;
                        model[segments].fill(Owner::Granted(session));
                        prop_assert!(table.owns(session, run));
                    }
                }
                TableStep::GrantWithin { session, count, part: (first, end) } => {
                    let held = table.held();
                    let mut starts = first..end.saturating_sub(count).saturating_add(1);
                    let wanted = starts.find(|&first| all_are(&model, Run { first, count }, Owner::Free));
                    let session = id(session);
                    let due = match wanted {
                        _ if count == 0 => Err(GrantError::Empty { session }),
                        _ if held + count > LIMIT => {
                            Err(GrantError::Quota { session, count, held, limit: LIMIT })
                        }
                        Some(first) if first + count <= end => Ok(Run { first, count }),
                        _ => Err(GrantError::NoRunWithin { session, count, first, end }),
                    };
                    prop_assert_eq!(table.grant_within(session, count, (first, end), 0), due);
                    if let Ok(run) = due {
                        let segments = run.first as usize..(run.first + run.count) as usize;
                        model[segments].fill(Owner::Granted(session));
                    }
                }
                TableStep::TakeBack { session, run } => {
                    let owned = all_are(&model, run, Owner::Granted(id(session)));
                    prop_assert_eq!(table.take_back(id(session), run).is_ok(), owned);
                    if owned {
                        let segments = run.first as usize..(run.first + run.count) as usize;
                        model[segments].fill(Owner::Quarantined(id(session)));
                    }
                }
                TableStep::TakeBackAll(session) => {
                    for owner in &mut model {
                        if *owner == Owner::Granted(id(session)) {
                            *owner = Owner::Quarantined(id(session));
                        }
                    }
                    let runs = table.take_back_all(id(session));
                    prop_assert_eq!(runs, runs_of(&model, Owner::Quarantined(id(session))));
                }
                TableStep::Scrub { session, run } => {
                    let owned = all_are(&model, run, Owner::Quarantined(id(session)));
                    prop_assert_eq!(table.scrubbed(id(session), run).is_ok(), owned);
                    if owned {
                        let segments = run.first as usize..(run.first + run.count) as usize;
                        model[segments].fill(Owner::Free);
                    }
                }
            }
            let held = model.iter().filter(|o| !matches!(o, Owner::Free | Owner::Reserved)).count();
            prop_assert_eq!(table.held() as usize, held);
            prop_assert!(table.held() <= LIMIT);
            for (segment, owner) in (0..).zip(model) {
                prop_assert_eq!(table.owner(segment), Some(owner));
            }
        }
    }
}
