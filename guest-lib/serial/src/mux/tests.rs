use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use rustix::event::{PollFd, Timespec, poll};

use super::*;
use crate::frame::MAX_DATA;
use crate::stream::WINDOW;

/// A host's side, and the backend's ends of its streams in the order of their opening.
fn host() -> (Mux, Receiver<UnixStream>) {
    let (opened, streams) = channel();
    (Mux::host(move || open(&opened)), streams)
}

fn open(opened: &Sender<UnixStream>) -> Option<Opening> {
    let (bell, _) = UnixStream::pair().ok()?;
    let (ours, theirs) = UnixStream::pair().ok()?;
    ours.set_nonblocking(true).ok()?;
    let (sender, stream) = channel();
    sender.send(theirs).ok()?;
    opened.send(ours).ok()?;
    Some(Opening { bell, stream })
}

/// Handles the events of all sockets that are there.
fn turn(mux: &mut Mux) {
    let mut ready = Vec::new();
    for (number, socket, flags) in mux.interests() {
        let mut polled = [PollFd::from_borrowed_fd(socket, flags)];
        poll(&mut polled, Some(&Timespec::default())).expect("it is open");
        ready.push((number, polled[0].revents()));
    }
    for (number, events) in ready {
        mux.ready(number, events);
    }
}

/// Passes frames until none is left.
fn pass(agent: &mut Mux, host: &mut Mux) {
    loop {
        turn(agent);
        turn(host);
        if !agent.has_frames() && !host.has_frames() {
            return;
        }
        give(agent, host);
        give(host, agent);
    }
}

fn give(from: &mut Mux, to: &mut Mux) {
    let mut bytes = Vec::new();
    from.produce(&mut bytes);
    assert!(bytes.len() <= 32 << 10, "{}", bytes.len());
    to.receive(&bytes).expect("one version");
}

/// Returns an agent and a host that have said hello.
fn both() -> (Mux, Mux, Receiver<UnixStream>) {
    let (mut host, streams) = host();
    let mut agent = Mux::agent(1);
    pass(&mut agent, &mut host);
    assert!(agent.is_synchronised() && host.is_synchronised());
    (agent, host, streams)
}

/// Adds a stream of root to the agent, and returns the process's end.
fn process(agent: &mut Mux) -> UnixStream {
    process_of(0, agent)
}

fn process_of(user: u32, agent: &mut Mux) -> UnixStream {
    let (ours, theirs) = UnixStream::pair().expect("sockets");
    theirs.set_nonblocking(true).expect("a socket");
    ours.set_nonblocking(true).expect("a socket");
    agent.add(ProcessSocket::new(theirs), user);
    ours
}

/// Returns whether the socket's other end is closed, by now or soon: another thread closes those of processes.
fn is_at_end(mut socket: &UnixStream) -> bool {
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        match socket.read(&mut [0]) {
            Ok(count) => return count == 0,
            Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < end => {
                std::thread::yield_now();
            }
            Err(error) => return error.kind() == ErrorKind::ConnectionReset,
        }
    }
}

/// Returns what the socket has.
fn all(mut socket: &UnixStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    let ended = socket.read_to_end(&mut bytes);
    assert!(ended.is_ok_and(|_| true) || !bytes.is_empty(), "nothing");
    bytes
}

fn encoded(frames: &[Frame<'_>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    frames.iter().for_each(|frame| frame.encode(&mut bytes));
    bytes
}

#[test]
fn streams_carry_bytes_both_ways_and_do_not_mix() {
    let (mut agent, mut host, streams) = both();
    let processes = [process(&mut agent), process(&mut agent)];
    for (mut process, byte) in processes.iter().zip(b"ab") {
        process.write_all(&[*byte; 9000]).expect("room");
    }
    pass(&mut agent, &mut host);
    let backend: Vec<UnixStream> = streams.try_iter().collect();
    for (mut stream, byte) in backend.iter().zip(b"ab") {
        assert!(all(stream) == [*byte; 9000]);
        stream.write_all(&[byte + 1; 9000]).expect("room");
    }
    pass(&mut agent, &mut host);
    for (process, byte) in processes.iter().zip(b"bc") {
        assert!(all(process) == [*byte; 9000]);
    }
    assert_eq!((agent.len(), host.len(), backend.len()), (2, 2, 2));
}

#[test]
fn the_end_of_either_side_follows_its_last_bytes() {
    let (mut agent, mut host, streams) = both();
    let mut killed = process(&mut agent);
    killed.write_all(&[7; 3000]).expect("room");
    let waiting = process(&mut agent);
    drop(killed);
    pass(&mut agent, &mut host);
    let [backend, mut other] = [streams.recv(), streams.recv()].map(|it| it.expect("opened"));
    assert!(all(&backend) == [7; 3000] && is_at_end(&backend));
    assert_eq!((agent.len(), host.len()), (1, 1));
    other.write_all(b"refused").expect("room");
    drop(other);
    pass(&mut agent, &mut host);
    assert!(all(&waiting) == b"refused" && is_at_end(&waiting));
    assert!(agent.is_empty() && host.is_empty());
}

/// Writes until nothing more is taken, and returns the number of bytes.
fn fill(mut socket: &UnixStream, mut pass: impl FnMut()) -> usize {
    let mut sent = 0;
    loop {
        match socket.write(&[7; 4096]) {
            Ok(count) => sent += count,
            Err(_) => {
                pass();
                match socket.write(&[7]) {
                    Ok(count) => sent += count,
                    Err(_) => return sent,
                }
            }
        }
    }
}

#[test]
fn a_reader_that_stops_delays_no_other_stream_and_loses_nothing() {
    let (mut agent, mut host, streams) = both();
    let stopped = process(&mut agent);
    let mut other = process(&mut agent);
    pass(&mut agent, &mut host);
    let [of_stopped, of_other] = [streams.recv(), streams.recv()].map(|it| it.expect("opened"));
    let sent = fill(&of_stopped, || pass(&mut agent, &mut host));
    assert!(sent >= WINDOW as usize);
    let outgoing = |mux: &Mux| mux.streams.by_number[&1].waiting();
    assert!(outgoing(&agent) <= WINDOW as usize);
    let back = fill(&stopped, || pass(&mut agent, &mut host));

    other.write_all(b"goes on").expect("room");
    pass(&mut agent, &mut host);
    assert_eq!(all(&of_other), b"goes on");
    let mut read = [0, 0];
    while read != [sent, back] {
        for (count, mut from) in read.iter_mut().zip([&stopped, &of_stopped]) {
            *count += from.read(&mut [0; 4096]).unwrap_or_default();
        }
        pass(&mut agent, &mut host);
    }
}

#[test]
fn what_breaks_the_protocol_ends_all_streams_until_the_next_hello() {
    const STREAM: u32 = 1;
    let data = |stream, bytes| Frame::Data { stream, bytes };
    let close = Frame::Close { stream: STREAM };
    let credit = |bytes| Frame::Credit {
        stream: STREAM,
        bytes,
    };
    let most = [7; MAX_DATA];
    let overdrawn = vec![data(STREAM, &most); WINDOW as usize / MAX_DATA + 1];
    for frames in [
        &[Frame::Open { stream: STREAM }][..],
        &[Frame::Open { stream: 0 }],
        &[data(2, b"none")],
        &[data(0, b"none")],
        &[Frame::Close { stream: 2 }],
        &[credit(1)],
        &[credit(u32::MAX)],
        &overdrawn,
        // More of a stream whose bytes the backend has not taken.
        &[data(STREAM, b"last"), close, close],
        &[data(STREAM, b"last"), close, data(STREAM, b"more")],
        &[data(STREAM, b"last"), close, credit(1)],
    ] {
        let (bells, _kept) = channel();
        let mut host = Mux::host(move || {
            let (bell, kept) = UnixStream::pair().ok()?;
            bells.send(kept).ok()?;
            let (_, stream) = channel();
            Some(Opening { bell, stream })
        });
        let hello = Frame::Hello {
            version: VERSION,
            nonce: 7,
        };
        let opened = encoded(&[hello, Frame::Open { stream: STREAM }]);
        host.receive(&opened).expect("a host has no error");
        assert_eq!(host.len(), 1);
        host.receive(&encoded(frames)).expect("a host has no error");
        assert!(host.is_empty() && !host.is_synchronised(), "{frames:?}");
        host.receive(&opened).expect("a host has no error");
        assert_eq!(host.len(), 1, "{frames:?}");
    }
    // Frames of streams that have ended may be on the way.
    let (mut agent, mut host, _streams) = both();
    drop(process(&mut agent));
    pass(&mut agent, &mut host);
    let late = encoded(&[data(STREAM, b"late"), credit(1), close]);
    agent.receive(&late).expect("one version");
    host.receive(&late).expect("one version");
    assert!(agent.is_synchronised() && host.is_synchronised());
    let open = encoded(&[Frame::Open { stream: 2 }]);
    agent.receive(&open).expect("one version");
    assert!(!agent.is_synchronised());
}

#[test]
fn an_agent_that_begins_anew_takes_the_place_of_the_one_before() {
    let (mut agent, mut host, streams) = both();
    let mut first = process(&mut agent);
    pass(&mut agent, &mut host);
    let backend = streams.recv().expect("opened");
    first.write_all(&[7; 100]).expect("room");
    turn(&mut agent);
    let mut bytes = Vec::new();
    agent.produce(&mut bytes);
    host.receive(&bytes[..50]).expect("a host has no error");
    drop(agent);
    // The answer to an earlier agent.
    let mut second = Mux::agent(2);
    let stale = encoded(&[Frame::Hello {
        version: VERSION,
        nonce: 1,
    }]);
    second.receive(&stale).expect("one version");
    assert!(!second.is_synchronised());
    pass(&mut second, &mut host);
    assert!(second.is_synchronised() && host.is_empty());
    // As if the process had been killed in the middle of its message.
    assert!(all(&backend).len() < 100 && is_at_end(&backend));
    let _process = process(&mut second);
    pass(&mut second, &mut host);
    assert_eq!(host.len(), 1);
}

#[test]
fn another_version_is_said_to_the_agent_and_opens_nothing() {
    let (mut host, streams) = host();
    let version = VERSION + 1;
    let hello = Frame::Hello { version, nonce: 1 };
    let frames = encoded(&[hello, Frame::Open { stream: 1 }]);
    host.receive(&frames).expect("a host has no error");
    assert!(streams.try_recv().is_err());
    let mut answer = Vec::new();
    host.produce(&mut answer);
    let version = VERSION;
    assert_eq!(answer, encoded(&[Frame::Hello { version, nonce: 1 }]));
    let mut agent = Mux::agent(1);
    assert_eq!(agent.receive(&encoded(&[hello])), Err(OtherVersion(2)));
}

#[test]
fn streams_beyond_the_limit_are_refused_and_those_of_a_guest_that_does_not_listen_too() {
    let (mut host, streams) = host();
    let hello = Frame::Hello {
        version: VERSION,
        nonce: 1,
    };
    host.receive(&encoded(&[hello])).expect("a host");
    let most = u32::try_from(MAX_STREAMS).expect("small");
    for stream in 1..=2 * most {
        host.receive(&encoded(&[Frame::Open { stream }]))
            .expect("a host");
    }
    assert_eq!(host.len(), MAX_STREAMS);
    assert_eq!(streams.try_iter().count(), MAX_STREAMS);
    let stream = 2 * most + 1;
    host.receive(&encoded(&[Frame::Open { stream }]))
        .expect("a host");
    assert!(host.is_empty());

    let (mut agent, mut refusing) = (Mux::agent(1), Mux::host(|| None));
    pass(&mut agent, &mut refusing);
    let refused = process(&mut agent);
    pass(&mut agent, &mut refusing);
    assert!(is_at_end(&refused));
    let processes = (0..=MAX_STREAMS).map(|_| process(&mut agent));
    let processes: Vec<UnixStream> = processes.collect();
    assert_eq!(agent.len(), MAX_STREAMS);
    assert!(is_at_end(&processes[MAX_STREAMS]));
}

#[test]
fn streams_of_one_user_leave_places_to_those_of_others() {
    let (mut agent, _host, _streams) = both();
    let processes = (0..=MOST_OF_USER).map(|_| process_of(1000, &mut agent));
    let mut processes: Vec<UnixStream> = processes.collect();
    assert_eq!(agent.len(), MOST_OF_USER);
    assert!(is_at_end(&processes[MOST_OF_USER]));
    let _other = process_of(1001, &mut agent);
    assert_eq!(agent.len(), MOST_OF_USER + 1);
    // The place of one that has ended is free.
    processes.clear();
    turn(&mut agent);
    agent.produce(&mut Vec::new());
    let before = agent.len();
    let _again = process_of(1000, &mut agent);
    assert_eq!(agent.len(), before + 1);
}

proptest! {
    #[test]
    fn any_frames_keep_the_bounds(
        steps in prop::collection::vec((0_u8..6, 0_u32..4, 0_usize..=MAX_DATA), 0..200),
    ) {
        let (mut host, streams) = host();
        let hello = Frame::Hello { version: VERSION, nonce: 1 };
        host.receive(&encoded(&[hello])).expect("a host");
        let bytes = [7; MAX_DATA];
        for (kind, stream, length) in steps {
            let frame = match kind {
                0 => Frame::Hello { version: stream, nonce: 0 },
                1 => Frame::Open { stream },
                2 => Frame::Credit { stream, bytes: 1 << length.min(31) },
                3 => Frame::Close { stream },
                _ => Frame::Data { stream, bytes: &bytes[..length] },
            };
            host.receive(&encoded(&[frame])).expect("a host");
            if length % 3 == 0 {
                turn(&mut host);
            }
            for stream in host.streams.by_number.values() {
                prop_assert!(stream.waiting() <= WINDOW as usize);
            }
            if length % 5 == 0 {
                host.produce(&mut Vec::new());
            }
        }
        drop(streams);
    }
}
