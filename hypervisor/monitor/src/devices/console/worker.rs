//! Moves bytes between the queues and the host's ends of the console.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use event_manager::{EventOps, EventSet, Events};
use virtio_queue::{Reader, Writer};

use super::input::PortInput;
use crate::devices::serial::Tee;
use crate::devices::virtio::{ActiveQueue, VirtioWorker};
use crate::ram::GuestRam;

/// Index of the transmit queue; the receive queue has index 0.
const TRANSMIT: usize = 1;
/// Maximum bytes that are copied at once.
const PIECE: usize = 4096;
/// Maximum bytes of output in one turn, after which the thread's other devices have theirs.
const TURN: usize = 16 * PIECE;
/// Pieces in a full pipe.
const PIPE: usize = 16;

/// Edge-triggered, so that input that waits for the guest's buffers does not keep the loop awake.
const ARRIVALS: EventSet = EventSet::IN.union(EventSet::EDGE_TRIGGERED);

#[derive(Debug)]
struct Active {
    receive: ActiveQueue,
    transmit: ActiveQueue,
}

/// Serves the two queues of the port.
#[derive(Debug)]
pub struct ConsoleWorker {
    memory: GuestRam,
    output: Tee,
    input: File,
    is_used: Arc<AtomicBool>,
    active: Option<Active>,
    /// Bytes of the next buffer of the transmit queue that are written already.
    sent: usize,
}

impl ConsoleWorker {
    /// Creates a worker without queues that writes the guest's output to `output`, and its input.
    ///
    /// # Errors
    /// No pipe can be created.
    pub fn new(memory: GuestRam, output: Tee) -> io::Result<(Self, PortInput)> {
        let (input, pipe) = io::pipe()?;
        let worker = Self::with_input(memory, output, input.into())?;
        let input = PortInput {
            pipe: OwnedFd::from(pipe).into(),
            is_used: Arc::clone(&worker.is_used),
        };
        Ok((worker, input))
    }

    /// Creates a worker as [`Self::new`] does, with this end of a pipe or socket as its input.
    ///
    /// # Errors
    /// The descriptor does not take FIONBIO.
    pub fn with_input(memory: GuestRam, output: Tee, input: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&input, true)?;
        Ok(Self {
            memory,
            output,
            input: input.into(),
            is_used: Arc::default(),
            active: None,
            sent: 0,
        })
    }

    /// Moves input to the guest, at most as many pieces as the queue's size, as long as the guest has buffers for it.
    fn receive(&mut self) {
        let Some(active) = &mut self.active else {
            return;
        };
        active.receive.serve_while(&self.memory, |chain| {
            let Ok(mut buffer) = Writer::new(&self.memory, chain) else {
                return Some(0);
            };
            let mut bytes = [0; PIECE];
            let room = buffer.available_bytes().min(PIECE);
            if room == 0 {
                return Some(0);
            }
            let count = read(&mut self.input, &mut bytes[..room])?;
            match buffer.write_all(&bytes[..count]) {
                Ok(()) => u32::try_from(count).ok(),
                Err(error) => {
                    tracing::debug!(%error, "a buffer for a console's input is not writable");
                    Some(0)
                }
            }
        });
    }

    /// Writes the guest's output, at most [`TURN`] bytes and as many buffers as the queue's size.
    fn transmit(&mut self) {
        let Some(active) = &mut self.active else {
            return;
        };
        let mut left = TURN;
        let (output, sent) = (&mut self.output, &mut self.sent);
        active.transmit.serve_while(&self.memory, |chain| {
            let mut bytes = [0; PIECE];
            // A driver that shortens a buffer meanwhile has it back.
            let rest = Reader::new(&self.memory, chain).and_then(|mut all| all.split_at(*sent));
            let Ok(mut rest) = rest else {
                *sent = 0;
                return Some(0);
            };
            while rest.available_bytes() > 0 {
                if left == 0 {
                    return None;
                }
                let most = PIECE.min(left);
                let Ok(count @ 1..) = rest.read(&mut bytes[..most]) else {
                    break;
                };
                // Output that the sink does not take is lost.
                let _ = output.write_all(&bytes[..count]);
                *sent += count;
                left -= count;
            }
            *sent = 0;
            Some(0)
        });
        if left < TURN {
            self.is_used.store(true, Ordering::Release);
            let _ = output.flush();
        }
        if left == 0 {
            active.transmit.again();
        }
    }
}

impl VirtioWorker for ConsoleWorker {
    fn start(&mut self, queues: Vec<ActiveQueue>, _: u64) {
        let mut queues = queues.into_iter();
        self.sent = 0;
        self.active = queues
            .next()
            .zip(queues.next())
            .map(|(receive, transmit)| Active { receive, transmit });
        // A driver that goes on from a snapshot may have written before it.
        let has_written = |active: &Active| active.transmit.next_used() != 0;
        let is_used = self.active.as_ref().is_some_and(has_written);
        self.is_used.store(is_used, Ordering::Release);
    }

    fn watch(&mut self, ops: &mut EventOps<'_>) {
        if let Err(error) = ops.add(Events::new(&self.input.as_fd(), ARRIVALS)) {
            tracing::error!(%error, "a console cannot wait for input");
        }
    }

    fn queue_ready(&mut self, queue: usize, _: &mut EventOps<'_>) {
        match queue {
            TRANSMIT => self.transmit(),
            _ => self.receive(),
        }
    }

    fn descriptor_ready(&mut self, events: Events, _: &mut EventOps<'_>) {
        if events.fd() == self.input.as_raw_fd() {
            self.receive();
        }
    }

    fn stop(&mut self) {
        self.active = None;
        self.is_used.store(false, Ordering::Release);
        // The next driver does not get input that was for this one.
        let mut bytes = [0; PIECE];
        for _ in 0..PIPE {
            if read(&mut self.input, &mut bytes).is_none() {
                break;
            }
        }
    }

    fn finish(&mut self) {
        self.transmit();
        self.active = None;
    }
}

/// Reads available bytes; `None` if there are none.
fn read(input: &mut File, bytes: &mut [u8]) -> Option<usize> {
    match input.read(bytes) {
        // No one writes any more.
        Ok(0) => None,
        Ok(count) => Some(count),
        Err(error) => {
            if error.kind() != ErrorKind::WouldBlock {
                tracing::debug!(%error, "the input of a console cannot be read");
            }
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use event_manager::{EventManager, SubscriberOps};
    use proptest::prelude::*;
    use vmm_sys_util::eventfd::EventFd;
    use wormhole_lock::Mutex;

    use super::super::device::QUEUE_SIZE;
    use super::super::input::ConsoleInput;
    use super::*;
    use crate::bus::BusDevice;
    use crate::devices::serial::{ConsoleTail, IrqTrigger, SerialPort};
    use crate::devices::virtio::QueueServer;
    use crate::devices::virtio::test_queue::{BUFFERS, NEXT, RAM, TestQueue, WRITE, hostile};

    /// A guest with both consoles.
    struct Guest {
        /// The queue of input, and that of output.
        queues: [TestQueue; 2],
        worker: ConsoleWorker,
        input: ConsoleInput,
        serial: Arc<Mutex<SerialPort>>,
        output: UnixStream,
    }

    impl Guest {
        fn new() -> Self {
            let receive = TestQueue::new(QUEUE_SIZE);
            let transmit = receive.second();
            let (sink, output) = UnixStream::pair().expect("sockets");
            sink.set_nonblocking(true).expect("a socket");
            output.set_nonblocking(true).expect("a socket");
            let tee = Tee::new(Box::new(sink), ConsoleTail::default());
            let made = ConsoleWorker::new(receive.memory.clone(), tee.other());
            let (worker, port) = made.expect("a pipe");
            let interrupt = IrqTrigger(EventFd::new(0).expect("an eventfd"));
            let (serial, serial_input) = SerialPort::new(interrupt, tee);
            let mut guest = Self {
                queues: [receive, transmit],
                worker,
                input: ConsoleInput::new(serial_input, port),
                serial,
                output,
            };
            guest.starts();
            guest
        }

        fn starts(&mut self) {
            let queues = self.queues.iter().map(TestQueue::active);
            self.worker.start(queues.collect(), 0);
        }

        /// Writes `text` to the port. `number` is the number of writes before this one.
        fn writes(&mut self, text: &str, number: u16) {
            let place = BUFFERS + 0x8000;
            let len = u32::try_from(text.len()).expect("short");
            self.queues[TRANSMIT].write_bytes(place, text.as_bytes());
            self.queues[TRANSMIT].offer(&[(place, len, 0, 0)], &[0; 16], number + 1);
            self.worker.transmit();
        }

        fn types(&mut self, text: &str) {
            self.input.write_all(text.as_bytes()).expect("room");
        }

        fn shown(&mut self) -> String {
            let mut text = vec![0; 1 << 20];
            let count = self.output.read(&mut text).unwrap_or(0);
            String::from_utf8_lossy(&text[..count]).into_owned()
        }

        /// Returns what the 8250 has received.
        fn serial_received(&self) -> String {
            let mut text = String::new();
            let mut port = self.serial.lock();
            let mut read = |register| {
                let mut byte = [0];
                port.read(register, &mut byte);
                byte[0]
            };
            while read(5) & 1 != 0 {
                text.push(char::from(read(0)));
            }
            text
        }
    }

    #[test]
    fn input_fills_buffers_and_waits_for_them() {
        let mut guest = Guest::new();
        guest.writes("$ ", 0);
        guest.types("a line of many bytes\n");
        let receive = &guest.queues[0];
        let table = [(BUFFERS, 4, WRITE | NEXT, 1), (BUFFERS + 16, 8, WRITE, 0)];
        receive.offer(&table, &[0; 16], 1);
        guest.worker.receive();
        assert_eq!(receive.lengths(), [12]);
        assert_eq!(receive.bytes(BUFFERS, 4), b"a li");
        assert_eq!(receive.bytes(BUFFERS + 16, 8), b"ne of ma");
        assert_eq!(receive.interrupts(), 1);
        receive.offer(&table, &[0; 16], 3);
        guest.worker.receive();
        // A buffer that is not needed stays with the device.
        assert_eq!(receive.lengths(), [12, 9]);
        assert_eq!(receive.bytes(BUFFERS + 16, 5), b"ytes\n");
        guest.worker.receive();
        assert_eq!((receive.used(), receive.interrupts()), (2, 2));
    }

    #[test]
    fn output_of_both_consoles_reaches_one_sink() {
        let mut guest = Guest::new();
        guest.serial.lock().write(0, b"early ");
        guest.queues[TRANSMIT].write_bytes(BUFFERS, b"guest login: ");
        let table = [(BUFFERS, 6, NEXT, 1), (BUFFERS + 6, 7, 0, 0)];
        guest.queues[TRANSMIT].offer(&table, &[0], 1);
        guest.worker.transmit();
        assert_eq!(guest.queues[TRANSMIT].lengths(), [0]);
        assert_eq!(guest.queues[TRANSMIT].interrupts(), 1);
        assert_eq!(guest.shown(), "early guest login: ");
    }

    #[test]
    fn input_follows_the_console_that_the_guest_has_written_to() {
        let mut guest = Guest::new();
        let receive = |guest: &mut Guest| {
            let offered = guest.queues[0].used() + 1;
            guest.queues[0].offer(&[(BUFFERS, 64, WRITE, 0)], &[0; 16], offered);
            guest.worker.receive();
        };
        // The driver of the port has buffers, but no program has opened it.
        guest.serial.lock().write(0, b"login: ");
        receive(&mut guest);
        guest.types("one");
        assert_eq!(guest.serial_received(), "one");
        guest.writes("hvc0 login: ", 0);
        guest.types("two");
        receive(&mut guest);
        assert_eq!(guest.serial_received(), "");
        assert_eq!(guest.queues[0].bytes(BUFFERS, 3), b"two");
        // Input that the driver has not taken ends with it.
        guest.types("three");
        guest.worker.stop();
        guest.types("four");
        assert_eq!(guest.serial_received(), "four");
        // A driver goes on from a snapshot with its queues.
        guest.worker.start(
            guest
                .queues
                .iter()
                .map(|queue| {
                    let mut active = queue.active();
                    assert!(active.go_on(&queue.memory));
                    active
                })
                .collect(),
            0,
        );
        guest.types("five");
        receive(&mut guest);
        assert_eq!(guest.queues[0].bytes(BUFFERS, 4), b"five");
    }

    #[test]
    fn a_writer_that_waits_for_the_8250_goes_over_to_the_port() {
        let mut guest = Guest::new();
        let mut input = guest.input;
        // The 8250 has room for 64 bytes, and no one reads them.
        let typing = std::thread::spawn(move || {
            input.write_all(&[b'x'; 65]).expect("it goes on");
            input
        });
        let receive = &guest.queues[0];
        receive.offer(&[(BUFFERS, 64, WRITE, 0)], &[0], 1);
        let transmit = &guest.queues[TRANSMIT];
        transmit.offer(&[(BUFFERS, 1, 0, 0)], &[0], 1);
        guest.worker.transmit();
        guest.input = typing.join().expect("no panic");
        guest.worker.receive();
        let serial = guest.serial_received().len();
        let port = receive.lengths()[0] as usize;
        // The first bytes are in the 8250 if the writer came before the guest's output.
        assert!(
            matches!((serial, port), (64, 1) | (0, 64)),
            "{serial}, {port}"
        );
    }

    #[test]
    fn a_sink_that_takes_nothing_holds_no_guest_up() {
        let mut guest = Guest::new();
        let table = [(0, 1 << 20, 0, 0)];
        guest.queues[TRANSMIT].offer(&table, &[0; 16], 2);
        for _ in 0..2 * (1 << 20) / TURN {
            assert!(guest.queues[TRANSMIT].used() < 2);
            guest.worker.transmit();
        }
        guest.worker.transmit();
        assert_eq!(guest.queues[TRANSMIT].used(), 2);
    }

    #[test]
    fn a_long_buffer_is_written_in_turns() {
        let mut guest = Guest::new();
        let text: Vec<u8> = (b'a'..=b'z').cycle().take(TURN + 100).collect();
        guest.queues[TRANSMIT].write_bytes(BUFFERS, &text);
        let len = u32::try_from(text.len()).expect("short");
        guest.queues[TRANSMIT].offer(&[(BUFFERS, len, 0, 0)], &[0], 1);
        guest.worker.transmit();
        assert_eq!(guest.queues[TRANSMIT].used(), 0);
        assert!(guest.queues[TRANSMIT].rung());
        let first = guest.shown();
        guest.worker.transmit();
        assert_eq!(guest.queues[TRANSMIT].used(), 1);
        assert!(!guest.queues[TRANSMIT].rung());
        assert!((first + &guest.shown()).as_bytes() == text);
    }

    #[test]
    fn buffers_of_the_wrong_kind_come_back_empty() {
        let mut guest = Guest::new();
        guest.writes("x", 0);
        guest.types("typed");
        let table = [
            (BUFFERS, 64, 0, 0),
            (RAM as u64, 64, WRITE, 0),
            (BUFFERS + 64, 64, WRITE, 0),
        ];
        guest.queues[0].offer(&table, &[0, 1, 2], 3);
        guest.worker.receive();
        assert_eq!(guest.queues[0].lengths(), [0, 0, 5]);
        assert_eq!(guest.shown(), "x");
        let table = [(BUFFERS, 64, WRITE, 0), (RAM as u64, 64, 0, 0)];
        guest.queues[TRANSMIT].offer(&table, &[0, 0, 1], 3);
        guest.worker.transmit();
        assert_eq!(guest.queues[TRANSMIT].used(), 3);
        assert_eq!(guest.shown(), "");
    }

    #[test]
    fn a_reset_ends_the_use_of_the_queues() {
        let mut guest = Guest::new();
        guest.worker.stop();
        guest.queues[0].offer(&[(BUFFERS, 64, WRITE, 0)], &[0], 1);
        guest.writes("late", 0);
        guest.worker.receive();
        assert_eq!(guest.queues[0].used() + guest.queues[TRANSMIT].used(), 0);
        assert_eq!(guest.shown(), "");
    }

    #[test]
    fn the_end_of_the_vm_writes_what_is_left_and_ends_the_input() {
        let mut guest = Guest::new();
        let place = BUFFERS;
        guest.queues[TRANSMIT].write_bytes(place, b"bye");
        guest.queues[TRANSMIT].offer(&[(place, 3, 0, 0)], &[0], 1);
        guest.worker.finish();
        assert_eq!(guest.shown(), "bye");
        let Guest {
            worker, mut input, ..
        } = guest;
        drop(worker);
        let error = input.write_all(b"x").expect_err("the VM is gone");
        assert_eq!(error.kind(), ErrorKind::BrokenPipe);
    }

    #[test]
    fn input_wakes_the_thread_of_the_device() {
        let mut guest = Guest::new();
        guest.writes("$ ", 0);
        guest.queues[0].offer(&[(BUFFERS, 64, WRITE, 0)], &[0; 16], 1);
        let Guest {
            queues,
            worker,
            mut input,
            ..
        } = guest;
        let kicks: Vec<_> = (0..2)
            .map(|_| Arc::new(EventFd::new(libc::EFD_NONBLOCK).expect("an eventfd")))
            .collect();
        let mut manager = EventManager::new().expect("an event loop");
        let server = QueueServer::new(Box::new(worker), kicks.clone());
        manager.add_subscriber(server);
        // The driver's notification: only now does the worker watch its input.
        kicks[0].write(1).expect("room");
        manager.run().expect("it goes on");
        assert_eq!(queues[0].used(), 0);
        input.write_all(b"ls\n").expect("room");
        manager.run().expect("it goes on");
        assert_eq!(queues[0].lengths(), [3]);
        assert_eq!(queues[0].bytes(BUFFERS, 3), b"ls\n");
    }

    proptest! {
        /// Arbitrary queue contents cause no panic, no hang and no write outside the descriptors' buffers.
        #[test]
        fn hostile_queues_are_survived(
            hostile in hostile(),
        ) {
            let mut guest = Guest::new();
            guest.writes("$ ", 0);
            guest.types(&"typed".repeat(1000));
            for queue in &guest.queues {
                queue.offer_hostile(&hostile);
            }
            for _ in 0..4 {
                guest.worker.receive();
                guest.worker.transmit();
            }
            prop_assert!(guest.queues[0].used() <= hostile.available);
            prop_assert!(guest.queues[0].guards(&hostile));
        }
    }
}
