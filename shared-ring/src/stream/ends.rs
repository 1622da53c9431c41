//! Both ends of a stream.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use zerocopy::IntoBytes;

use super::{MOST, Message, Reply, Request};
use crate::fence::{FenceIndex, Fences};
use crate::layout::MAX_BODY;
use crate::memory::SessionMemory;
use crate::ring::{Cursors, Producer, PushError, RecordHead, Sleep};
use crate::slot::AnswerSlots;
use crate::status::{EndCause, Status};
use crate::wait::{Backoff, Step};

/// Time for which a server waits for an answer after the session has ended.
const GRACE: Duration = Duration::from_secs(10);

/// Failure of a stream.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// The other end is gone, or the stream is broken.
    #[error("the stream failed: {0}")]
    Io(#[from] io::Error),
    /// The other end sent something that no correct one sends.
    #[error("a message on the stream is malformed: {0}")]
    Malformed(&'static str),
    /// A record cannot be put into the ring.
    #[error("the ring takes no record: {0}")]
    Ring(#[from] PushError),
    /// The session has ended.
    #[error("the session has ended")]
    Over,
}

/// End of a program's thread.
#[derive(Debug)]
pub struct Client<S> {
    stream: S,
    /// The message that is being sent, or the data of its answer.
    buffer: Vec<u8>,
}

impl<S: Read + Write> Client<S> {
    /// Creates the end of a connected stream.
    pub const fn new(stream: S) -> Self {
        Self {
            stream,
            buffer: Vec::new(),
        }
    }

    /// Sends a record with the concatenation of `parts` as its body, and waits until the worker has it, or has answered
    /// it if it has a slot. Returns the answer's status and its payload.
    ///
    /// # Errors
    /// The stream failed, or the session has ended.
    pub fn record(
        &mut self,
        head: RecordHead,
        parts: &[&[u8]],
    ) -> Result<(u32, &[u8]), StreamError> {
        let reply = self.exchange(Message::Record(head), 0, parts)?;
        self.data(reply)?;
        Ok((reply.status, &self.buffer))
    }

    /// Copies bytes to an offset of the session's file, at most [`MOST`].
    ///
    /// # Errors
    /// As [`Client::record`].
    pub fn put(&mut self, offset: u64, bytes: &[u8]) -> Result<(), StreamError> {
        self.exchange(Message::Put(offset), 0, &[bytes]).map(drop)
    }

    /// Copies bytes from an offset of the session's file, at most [`MOST`].
    ///
    /// # Errors
    /// As [`Client::record`].
    pub fn get(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), StreamError> {
        let reply = self.exchange(Message::Get(offset), bytes.len(), &[])?;
        if reply.bytes != bytes.len() as u64 {
            return Err(StreamError::Malformed("the data have another length"));
        }
        Ok(self.stream.read_exact(bytes)?)
    }

    /// Waits until a fence has at least this value, or the session has ended.
    ///
    /// # Errors
    /// As [`Client::record`].
    pub fn wait_fence(&mut self, fence: FenceIndex, value: u64) -> Result<(), StreamError> {
        self.exchange(Message::Fence(fence, value), 0, &[])
            .map(drop)
    }

    /// Sends a message with its data, or one that asks for so many bytes, and returns the answer without its data.
    fn exchange(
        &mut self,
        message: Message,
        asked: usize,
        parts: &[&[u8]],
    ) -> Result<Reply, StreamError> {
        let sent: usize = parts.iter().map(|part| part.len()).sum();
        let bytes = u32::try_from(asked + sent).ok();
        let bytes = bytes.filter(|bytes| *bytes as usize <= MOST);
        let request = Request::new(
            message,
            bytes.ok_or(StreamError::Malformed("too many data"))?,
        );
        self.buffer.clear();
        self.buffer.extend_from_slice(request.as_bytes());
        for part in parts {
            self.buffer.extend_from_slice(part);
        }
        self.stream.write_all(&self.buffer)?;
        Reply::receive(&mut self.stream)
    }

    /// Reads the data of a record's answer into the buffer.
    fn data(&mut self, reply: Reply) -> Result<(), StreamError> {
        self.buffer.resize(reply.data()?, 0);
        Ok(self.stream.read_exact(&mut self.buffer)?)
    }
}

/// Passes the bytes of a message to a stream for a client that is elsewhere, such as in a VM. Returns after the answer,
/// whose data are left in `data`.
///
/// # Errors
/// The stream failed, or the session has ended.
pub fn pass_on(
    mut stream: impl Read + Write,
    message: &[u8],
    data: &mut Vec<u8>,
) -> Result<(), StreamError> {
    stream.write_all(message)?;
    let reply = Reply::receive(&mut stream)?;
    data.resize(reply.data()?, 0);
    Ok(stream.read_exact(data)?)
}

impl Reply {
    fn receive(stream: &mut impl Read) -> Result<Self, StreamError> {
        let mut reply = Self::default();
        stream.read_exact(reply.as_mut_bytes())?;
        match reply.over {
            0 => Ok(reply),
            _ => Err(StreamError::Over),
        }
    }

    /// Returns the number of bytes of data that follow.
    fn data(&self) -> Result<usize, StreamError> {
        let bytes = usize::try_from(self.bytes).ok();
        bytes
            .filter(|bytes| *bytes <= MOST)
            .ok_or(StreamError::Malformed("the answer is too long"))
    }
}

/// Serves a stream until its client closes it: `carry_out` gets each message with its data, leaves the answer's data in the
/// buffer, which for [`Message::Get`] has their length already, and returns the status.
///
/// # Errors
/// The stream failed, its client does not keep to the protocol, or an error of `carry_out` but [`StreamError::Over`], which
/// the client is told.
pub fn serve(
    mut stream: impl Read + Write,
    mut carry_out: impl FnMut(Message, &mut Vec<u8>) -> Result<u32, StreamError>,
) -> Result<(), StreamError> {
    let mut buffer = Vec::new();
    loop {
        let mut request = Request::default();
        match stream.read_exact(request.as_mut_bytes()) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            read => read?,
        }
        let message = request.message();
        let (message, bytes) = message.ok_or(StreamError::Malformed("unknown request"))?;
        buffer.resize(bytes, 0);
        if !matches!(message, Message::Get(_)) {
            stream.read_exact(&mut buffer)?;
        }
        let (over, status) = match carry_out(message, &mut buffer) {
            Ok(status) => (0, status),
            Err(StreamError::Over) => {
                buffer.clear();
                (1, 0)
            }
            Err(error) => return Err(error),
        };
        let reply = Reply {
            over,
            status,
            bytes: buffer.len() as u64,
        };
        buffer.splice(0..0, reply.as_bytes().iter().copied());
        stream.write_all(&buffer)?;
    }
}

/// End beside the backend, for all threads of a program.
#[derive(Debug)]
pub struct Server {
    memory: SessionMemory,
    /// The session's file, in which the arena lies.
    file: File,
    producer: Producer,
    slots: AnswerSlots,
    fences: Fences,
    status: Status,
}

impl Server {
    /// Creates the server of the session in `memory`, which lies in `file`.
    ///
    /// # Safety
    /// All producers of the session that live in this process are values of this crate. No other thread of this process
    /// publishes or polls answers.
    #[must_use]
    pub unsafe fn new(memory: SessionMemory, file: File) -> Self {
        // SAFETY: the caller's promise; a slot is polled by the thread that serves its request.
        let (producer, slots) = unsafe {
            (
                Producer::new(memory.clone()),
                AnswerSlots::new(memory.clone()),
            )
        };
        Self {
            file,
            producer,
            slots,
            fences: Fences::new(memory.clone()),
            status: Status::new(memory.clone()),
            memory,
        }
    }

    /// Serves one stream until its client closes it.
    ///
    /// # Errors
    /// As [`serve`].
    pub fn serve(&self, stream: impl Read + Write) -> Result<(), StreamError> {
        serve(stream, |message, buffer| self.carry_out(message, buffer))
    }

    fn carry_out(&self, message: Message, buffer: &mut Vec<u8>) -> Result<u32, StreamError> {
        match message {
            Message::Record(head) => return self.record(head, buffer),
            Message::Put(offset) => {
                self.file.write_all_at(buffer, offset)?;
                buffer.clear();
            }
            Message::Get(offset) => self.file.read_exact_at(buffer, offset)?,
            Message::Fence(fence, value) => {
                let reached = || (self.fences.load(fence) >= value).then_some(());
                self.wait(Duration::ZERO, reached)?;
                buffer.clear();
            }
        }
        Ok(0)
    }

    fn record(&self, head: RecordHead, buffer: &mut Vec<u8>) -> Result<u32, StreamError> {
        if buffer.len() > MAX_BODY {
            return Err(StreamError::Malformed("the record is too long"));
        }
        self.wait(Duration::ZERO, || {
            match self.producer.push(head, &[buffer]) {
                Err(PushError::Full { .. }) => None,
                pushed => Some(pushed),
            }
        })??;
        // A server is on the backend's own system.
        if self.producer.must_ring() == Some(Sleep::OnWord) {
            self.producer.wake_consumer();
        }
        let Some(slot) = head.slot else {
            let end = Cursors::of(&self.memory).tail;
            let taken = || (Cursors::of(&self.memory).head >= end).then_some(());
            self.wait(Duration::ZERO, taken)?;
            buffer.clear();
            return Ok(0);
        };
        let answer = self.wait(GRACE, || self.slots.poll(slot, head.sequence).transpose())?;
        let answer = answer.map_err(|_| StreamError::Malformed("an answer is too long"))?;
        buffer.resize(answer.length, 0);
        self.slots.copy_payload(slot, 0, buffer);
        Ok(answer.status)
    }

    /// Waits until `done` returns a value, and at most for `grace` after the end of the session.
    fn wait<T>(
        &self,
        grace: Duration,
        mut done: impl FnMut() -> Option<T>,
    ) -> Result<T, StreamError> {
        let mut backoff = Backoff::new();
        let mut ended = None;
        loop {
            if let Some(value) = done() {
                return Ok(value);
            }
            if let Some(cause) = self.status.load() {
                // Only the worker of a dead context still answers.
                let is_dead = EndCause::from_code(cause.cause) == Some(EndCause::ContextDead);
                let since = ended.get_or_insert_with(Instant::now).elapsed();
                if !is_dead || since >= grace {
                    // The value may have come just before the end.
                    return done().ok_or(StreamError::Over);
                }
            }
            match backoff.step() {
                Step::Spun => {}
                Step::Yield => std::thread::yield_now(),
                Step::Sleep(duration) => std::thread::sleep(duration),
            }
        }
    }
}

// Miri opens no files.
#[cfg(all(test, not(miri)))]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::thread;

    use super::*;
    use crate::memory::OwnedMemory;
    use crate::ring::{Consumer, RecordBuf};
    use crate::slot::SlotIndex;

    /// A session in a region that outlives the test, and a server of it with an empty file.
    fn server() -> (SessionMemory, &'static Server) {
        let region: &'static OwnedMemory = Box::leak(Box::new(OwnedMemory::segments(1)));
        let file = tempfile();
        file.set_len(1 << 16).unwrap();
        // SAFETY: the region is never freed, and the test's other values poll no answers.
        unsafe {
            let memory = region.session(0).unwrap();
            let server = Server::new(memory.clone(), file);
            (memory, Box::leak(Box::new(server)))
        }
    }

    /// Creates a file without a name.
    fn tempfile() -> File {
        let name = format!(
            "wormhole-{}-{:?}",
            std::process::id(),
            thread::current().id()
        );
        let path = std::env::temp_dir().join(name);
        let mut options = File::options();
        let file = options
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)
            .unwrap();
        std::fs::remove_file(path).unwrap();
        file
    }

    /// Returns a client of a server's new thread, and that thread.
    fn connect(
        server: &'static Server,
    ) -> (
        Client<UnixStream>,
        thread::JoinHandle<Result<(), StreamError>>,
    ) {
        let (near, far) = UnixStream::pair().unwrap();
        (Client::new(near), thread::spawn(move || server.serve(far)))
    }

    #[test]
    fn records_of_several_streams_are_taken_and_answered() {
        const EACH: u64 = 200;
        let (memory, server) = server();
        // SAFETY: the only consumer and the only publisher.
        let (mut consumer, slots) = unsafe {
            (
                Consumer::new(memory.clone()),
                AnswerSlots::new(memory.clone()),
            )
        };
        let worker = thread::spawn(move || {
            let mut buffer = RecordBuf::new();
            let mut taken = 0;
            while taken < 2 * EACH {
                let Some(head) = consumer.take(&mut buffer).unwrap() else {
                    thread::yield_now();
                    continue;
                };
                if let Some(slot) = head.slot {
                    let turned: Vec<u8> = buffer.body().iter().rev().copied().collect();
                    slots.publish(slot, head.sequence, 7, &[&turned]).unwrap();
                }
                taken += 1;
            }
        });
        let clients = [3, 4].map(|number: u16| {
            let (mut client, _) = connect(server);
            thread::spawn(move || {
                let slot = SlotIndex::new(number).unwrap();
                for round in 1..=EACH {
                    if round % 2 == 0 {
                        let sent = client.record(RecordHead::record(12), &[b"stream"]);
                        assert_eq!(sent.unwrap(), (0, &[][..]));
                    } else {
                        let head = RecordHead::request(13, slot, round).by(number);
                        let text = round.to_le_bytes();
                        let answered = client.record(head, &[&text[..4], &text[4..]]);
                        let turned: Vec<u8> = text.iter().rev().copied().collect();
                        assert_eq!(answered.unwrap(), (7, &turned[..]));
                    }
                }
            })
        });
        for client in clients {
            client.join().unwrap();
        }
        worker.join().unwrap();
    }

    #[test]
    fn data_go_to_the_file_and_come_back() {
        let (_, server) = server();
        let (mut client, serving) = connect(server);
        let sent: Vec<u8> = (0..=255).cycle().take(5000).collect();
        client.put(4096, &sent).unwrap();
        let mut got = vec![0; 5000];
        client.get(4096, &mut got).unwrap();
        assert_eq!(got, sent);
        client.get(4095, &mut got[..2]).unwrap();
        assert_eq!(got[..2], [0, 0]);
        let long = vec![0; MOST + 1];
        assert!(matches!(
            client.put(0, &long),
            Err(StreamError::Malformed(_))
        ));
        drop(client);
        serving.join().unwrap().unwrap();
    }

    #[test]
    fn a_fence_is_waited_for_and_the_end_of_the_session_ends_the_wait() {
        let (memory, server) = server();
        let (mut client, _) = connect(server);
        let fence = FenceIndex::new(5).unwrap();
        let fences = Fences::new(memory.clone());
        let device = thread::spawn(move || {
            thread::sleep(Duration::from_millis(5));
            fences.store(fence, 9);
        });
        client.wait_fence(fence, 9).unwrap();
        device.join().unwrap();
        let status = Status::new(memory);
        let end = thread::spawn(move || {
            thread::sleep(Duration::from_millis(5));
            status.set_once(1, EndCause::ContextDead);
        });
        assert!(matches!(
            client.wait_fence(fence, 10),
            Err(StreamError::Over)
        ));
        end.join().unwrap();
    }

    #[test]
    fn a_client_that_sends_nonsense_is_cut_off() {
        let (_, server) = server();
        let fence = Message::Fence(FenceIndex::new(0).unwrap(), 0);
        let (put, fence) = (Request::new(Message::Put(0), 0), Request::new(fence, 0));
        let record = Request::new(Message::Record(RecordHead::record(1)), 0);
        let cases = [
            Request { kind: 9, ..put },
            Request {
                bytes: u32::MAX,
                ..put
            },
            Request {
                words: [u16::MAX; 4],
                ..fence
            },
            Request {
                words: [1, 1, u16::MAX - 1, 0],
                ..record
            },
        ];
        for request in cases {
            let (mut near, far) = UnixStream::pair().unwrap();
            let serving = thread::spawn(move || server.serve(far));
            near.write_all(request.as_bytes()).unwrap();
            let error = serving.join().unwrap().unwrap_err();
            assert!(matches!(error, StreamError::Malformed(_)), "{error}");
        }
    }
}
