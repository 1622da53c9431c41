//! Emulates the serial console: an 8250 whose output goes to the caller's sink and to a ring of the
//! last lines, and whose input comes from a [`SerialInput`].
//!
//! The sink is written on the thread of the vCPU that accesses the port. It never blocks: the callers' sinks take what
//! they have room for ([`crate::VmConfig::console`]), and the port's lock and the sink's are held for one such write.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Weak};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use vm_superio::serial::{SerialEvents, SerialState};
use vm_superio::{Serial, Trigger};
use vmm_sys_util::eventfd::EventFd;
use wormhole_lock::Mutex;

use crate::bus::{BusDevice, Effect};

/// First port of COM1.
pub const COM1: u16 = 0x3f8;
/// Number of ports of an 8250.
pub const PORTS: u16 = 8;
/// Interrupt line of COM1.
pub const IRQ: u32 = 4;

/// Number of lines in the ring.
const KEPT_LINES: usize = 64;
/// Maximum bytes of a line; the rest is dropped.
const LINE_LIMIT: usize = 512;
/// Time after which input is offered again to a port that takes none for now. A port that leaves its loopback mode gives
/// no other sign.
const OFFERED_AGAIN: Duration = Duration::from_millis(100);

/// An interrupt line that an eventfd raises.
#[derive(Debug)]
pub struct IrqTrigger(pub EventFd);

impl Trigger for IrqTrigger {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// Last lines that a guest wrote, its first panic line, and its first out-of-memory line.
#[derive(Debug, Default)]
struct Lines {
    last: VecDeque<String>,
    /// The unfinished line of each console.
    current: [Vec<u8>; 2],
    panic: Option<String>,
    out_of_memory: Option<String>,
}

impl Lines {
    fn byte(&mut self, console: usize, byte: u8) {
        let current = &mut self.current[console];
        if byte != b'\n' {
            if current.len() < LINE_LIMIT {
                current.push(byte);
            }
            return;
        }
        let line = String::from_utf8_lossy(current)
            .trim_end_matches('\r')
            .to_owned();
        current.clear();
        if self.panic.is_none() && line.contains("Kernel panic - not syncing") {
            self.panic = Some(line.clone());
        }
        if self.out_of_memory.is_none()
            && (line.contains("Out of memory: Killed process")
                || line.contains("deadlocked on memory"))
        {
            self.out_of_memory = Some(line.clone());
        }
        if self.last.len() == KEPT_LINES {
            self.last.pop_front();
        }
        self.last.push_back(line);
    }
}

/// Shared handle to the last lines of the guest's console.
#[derive(Debug, Clone, Default)]
pub struct ConsoleTail(Arc<Mutex<Lines>>);

impl ConsoleTail {
    /// Returns the last lines, oldest first. Unfinished lines come last.
    pub fn lines(&self) -> Vec<String> {
        let lines = self.0.lock();
        let unfinished = lines.current.iter().filter(|line| !line.is_empty());
        let unfinished = unfinished.map(|line| String::from_utf8_lossy(line).into_owned());
        lines.last.iter().cloned().chain(unfinished).collect()
    }

    /// Returns the line with which the kernel reported a panic.
    pub fn panic(&self) -> Option<String> {
        self.0.lock().panic.clone()
    }

    /// Returns the line with which the kernel reported that memory ran out.
    pub fn out_of_memory(&self) -> Option<String> {
        self.0.lock().out_of_memory.clone()
    }
}

/// Writer that copies a console's output to the caller's sink and to a [`ConsoleTail`].
pub struct Tee {
    sink: Arc<Mutex<Box<dyn Write + Send>>>,
    tail: ConsoleTail,
    /// Number of the console.
    console: usize,
}

impl std::fmt::Debug for Tee {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tee")
            .field("tail", &self.tail)
            .finish_non_exhaustive()
    }
}

impl Tee {
    /// Creates a writer to `sink` and `tail`.
    pub fn new(sink: Box<dyn Write + Send>, tail: ConsoleTail) -> Self {
        Self {
            sink: Arc::new(Mutex::new(sink)),
            tail,
            console: 0,
        }
    }

    /// Returns a writer of the guest's other console, to the same sink and tail. A line of the tail is of one console.
    #[must_use]
    pub fn other(&self) -> Self {
        Self {
            sink: Arc::clone(&self.sink),
            tail: self.tail.clone(),
            console: 1,
        }
    }
}

impl Write for Tee {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        {
            let mut lines = self.tail.0.lock();
            for byte in bytes {
                lines.byte(self.console, *byte);
            }
        }
        // A failed sink (a closed pipe) must not fail the guest's console.
        if let Err(error) = self.sink.lock().write_all(bytes) {
            tracing::debug!(%error, "the console's sink refuses output");
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.sink.lock().flush()
    }
}

/// Tells the [`SerialInput`] that the guest has read all that was typed.
#[derive(Debug)]
struct Emptied(SyncSender<()>);

impl SerialEvents for Emptied {
    fn buffer_read(&self) {}
    fn out_byte(&self) {}
    fn tx_lost_byte(&self) {}

    fn in_buffer_empty(&self) {
        // One message waits at most, and without a receiver there is no input.
        let _ = self.0.try_send(());
    }
}

/// State of the port.
#[derive(Debug, Serialize, Deserialize)]
pub struct SerialPortState {
    /// Divisor (low, high), interrupt enable and identification, line control and status, modem control and status,
    /// scratch.
    registers: [u8; 9],
    /// Input that the guest has not read yet.
    input: Vec<u8>,
}

/// The 8250 at [`COM1`].
#[derive(Debug)]
pub struct SerialPort(Serial<IrqTrigger, Emptied, Tee>);

impl SerialPort {
    /// Creates a port that raises `interrupt` and writes the guest's output to `output`, and its input.
    pub fn new(interrupt: IrqTrigger, output: Tee) -> (Arc<Mutex<Self>>, SerialInput) {
        let (sender, emptied) = sync_channel(1);
        Self::of(
            Serial::with_events(interrupt, Emptied(sender), output),
            emptied,
        )
    }

    /// Creates a port as [`Self::new`] does, with a state. Raises the interrupt that it has. `None` if the state has more
    /// input than a port.
    pub fn restored(
        interrupt: IrqTrigger,
        output: Tee,
        saved: &SerialPortState,
    ) -> Option<(Arc<Mutex<Self>>, SerialInput)> {
        let [
            low,
            high,
            enable,
            identification,
            line,
            line_status,
            modem,
            modem_status,
            scratch,
        ] = saved.registers;
        let state = SerialState {
            baud_divisor_low: low,
            baud_divisor_high: high,
            interrupt_enable: enable,
            interrupt_identification: identification,
            line_control: line,
            line_status,
            modem_control: modem,
            modem_status,
            scratch,
            in_buffer: saved.input.clone(),
        };
        let (sender, emptied) = sync_channel(1);
        let serial = Serial::from_state(&state, interrupt, Emptied(sender), output);
        Some(Self::of(serial.ok()?, emptied))
    }

    fn of(
        serial: Serial<IrqTrigger, Emptied, Tee>,
        emptied: Receiver<()>,
    ) -> (Arc<Mutex<Self>>, SerialInput) {
        let port = Arc::new(Mutex::new(Self(serial)));
        let input = SerialInput {
            port: Arc::downgrade(&port),
            emptied,
        };
        (port, input)
    }

    /// Returns the state.
    pub fn save(&self) -> SerialPortState {
        let state = self.0.state();
        SerialPortState {
            registers: [
                state.baud_divisor_low,
                state.baud_divisor_high,
                state.interrupt_enable,
                state.interrupt_identification,
                state.line_control,
                state.line_status,
                state.modem_control,
                state.modem_status,
                state.scratch,
            ],
            input: state.in_buffer,
        }
    }

    /// Gives the guest some first bytes of `bytes`, and returns their number.
    fn take(&mut self, bytes: &[u8]) -> usize {
        // A full buffer is an error, and a port in loopback mode takes 0 bytes.
        self.0.enqueue_raw_bytes(bytes).unwrap_or(0)
    }
}

/// Input of the port.
#[derive(Debug)]
pub struct SerialInput {
    port: Weak<Mutex<SerialPort>>,
    emptied: Receiver<()>,
}

impl SerialInput {
    /// Gives the guest some first bytes of `bytes`, and returns their number. 0 if the port has no room for any: then this
    /// has waited until the guest has read what was given before, or for a while.
    ///
    /// # Errors
    /// The VM is gone.
    pub fn offer(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = match self.port.upgrade() {
            None => return Err(io::ErrorKind::BrokenPipe.into()),
            Some(port) => port.lock().take(bytes),
        };
        if taken > 0 || bytes.is_empty() {
            return Ok(taken);
        }
        match self.emptied.recv_timeout(OFFERED_AGAIN) {
            Ok(()) | Err(RecvTimeoutError::Timeout) => Ok(0),
            Err(RecvTimeoutError::Disconnected) => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }
}

impl BusDevice for SerialPort {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        // A string instruction reads the same register repeatedly.
        for byte in data {
            *byte = u8::try_from(offset).map_or(0xff, |register| self.0.read(register));
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Effect {
        let Ok(register) = u8::try_from(offset) else {
            return Effect::Continue;
        };
        for byte in data {
            if let Err(error) = self.0.write(register, *byte) {
                tracing::debug!(?error, "the serial port cannot take a byte");
            }
        }
        Effect::Continue
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn input_waits_for_the_guest_and_ends_with_its_port() {
        let all = |input: &mut SerialInput, mut bytes: &[u8]| {
            while !bytes.is_empty() {
                bytes = &bytes[input.offer(bytes)?..];
            }
            Ok::<_, io::Error>(())
        };
        let interrupt = IrqTrigger(EventFd::new(0).expect("an eventfd"));
        let output = Tee::new(Box::new(io::sink()), ConsoleTail::default());
        let (port, mut input) = SerialPort::new(interrupt, output);
        let typed: Vec<u8> = (0..=255).collect();
        let mut read = Vec::new();
        std::thread::scope(|scope| {
            let typing = scope.spawn(|| all(&mut input, &typed));
            while read.len() < typed.len() {
                let mut port = port.lock();
                let mut status = [0];
                port.read(5, &mut status);
                if status[0] & 1 != 0 {
                    let mut byte = [0];
                    port.read(0, &mut byte);
                    read.push(byte[0]);
                }
            }
            typing.join().expect("no panic").expect("all is typed");
        });
        assert_eq!(read, typed);
        all(&mut input, &[0; 64]).expect("the buffer has room");
        let typing = std::thread::spawn(move || all(&mut input, b"more"));
        drop(port);
        let error = typing.join().expect("no panic").expect_err("it is gone");
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }

    /// Returns a trigger, and the eventfd that it signals.
    fn trigger() -> (IrqTrigger, EventFd) {
        let event = EventFd::new(libc::EFD_NONBLOCK).expect("an eventfd");
        (IrqTrigger(event.try_clone().expect("a descriptor")), event)
    }

    #[test]
    fn a_restored_port_has_its_registers_and_its_input_and_interrupts_for_it() {
        let output = || Tee::new(Box::new(io::sink()), ConsoleTail::default());
        let (saved, mut typed) = SerialPort::new(trigger().0, output());
        // Received data interrupts, and the scratch register has a byte.
        saved.lock().write(1, &[1]);
        saved.lock().write(7, &[0x5a]);
        assert_eq!(typed.offer(b"typed").ok(), Some(5));
        let mut state = saved.lock().save();
        let (interrupt, event) = trigger();
        let restored = SerialPort::restored(interrupt, output(), &state);
        let (port, mut input) = restored.expect("it fits");
        assert_eq!(event.read().ok(), Some(1));
        assert_eq!(input.offer(b" more").ok(), Some(5));
        let read = |register, len| {
            let mut bytes = vec![0; len];
            port.lock().read(register, &mut bytes);
            bytes
        };
        assert_eq!((read(7, 1), read(1, 1)), (vec![0x5a], vec![1]));
        assert_eq!(read(0, 10), b"typed more");
        state.input = vec![0; 65];
        assert!(SerialPort::restored(trigger().0, output(), &state).is_none());
    }

    #[test]
    fn the_tail_is_bounded_and_finds_the_panic() {
        let tail = ConsoleTail::default();
        let mut tee = Tee::new(Box::new(io::sink()), tail.clone());
        for number in 0..1000 {
            writeln!(tee, "line {number}").expect("write");
        }
        tee.write_all(&[b'x'; 100_000]).expect("write");
        tee.write_all(b"\r\n[    1.0] Kernel panic - not syncing: test\r\nhalf")
            .expect("write");
        let lines = tail.lines();
        assert_eq!(lines.len(), KEPT_LINES + 1);
        assert_eq!(lines.last().map(String::as_str), Some("half"));
        assert!(lines.iter().all(|line| line.len() <= LINE_LIMIT));
        assert_eq!(
            tail.panic().as_deref(),
            Some("[    1.0] Kernel panic - not syncing: test")
        );
        assert_eq!(tail.out_of_memory(), None);
    }

    #[test]
    fn a_line_of_one_console_is_whole_whatever_the_other_writes() {
        let tail = ConsoleTail::default();
        let mut serial = Tee::new(Box::new(io::sink()), tail.clone());
        let mut port = serial.other();
        serial.write_all(b"Kernel panic - not ").expect("a sink");
        port.write_all(b"a line\nguest ").expect("a sink");
        serial.write_all(b"syncing: test\n").expect("a sink");
        port.write_all(b"login: ").expect("a sink");
        let panic = "Kernel panic - not syncing: test";
        assert_eq!(tail.panic().as_deref(), Some(panic));
        assert_eq!(tail.lines(), ["a line", panic, "guest login: "]);
    }
}
