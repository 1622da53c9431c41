//! Launches that the executor has collected.

use wormhole_device::{Launch, LaunchEvents, RawFunction, RawStream};

use super::LONGEST;
use crate::objects::StreamObject;

/// Most bytes of parameters of a launch that is collected.
pub(super) const PARAMETERS: usize = 1024;

#[derive(Clone, Copy, Debug)]
struct Collected {
    function: RawFunction,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    /// Begin and end of the parameters.
    parameters: (usize, usize),
}

/// Launches on one stream, and their parameters. Both lists have their room from the beginning on.
#[derive(Debug)]
pub(super) struct Pending {
    /// Thread of the guest that launches; 0 for several, and for an unknown one.
    thread: u16,
    /// Whether the stream waits for the legacy stream.
    blocking: bool,
    is_legacy: bool,
    launches: Vec<Collected>,
    parameters: Vec<u8>,
}

impl Pending {
    pub fn new() -> Self {
        Self {
            thread: 0,
            blocking: false,
            is_legacy: false,
            launches: Vec::with_capacity(LONGEST),
            parameters: Vec::with_capacity(LONGEST * PARAMETERS),
        }
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.launches.is_empty()
    }

    #[inline]
    pub fn len(&self) -> usize {
        self.launches.len()
    }

    /// Returns whether launches have been collected that a call of the thread on another stream must come behind.
    #[inline]
    pub fn comes_before(&self, stream: &StreamObject, thread: u16) -> bool {
        let one_thread = thread == 0 || [0, thread].contains(&self.thread);
        let legacy = stream.raw == RawStream::LEGACY;
        let wait = (legacy && self.blocking) || (self.is_legacy && stream.blocking);
        !self.is_empty() && (one_thread || wait)
    }

    #[inline]
    pub fn push(&mut self, thread: u16, blocking: bool, launch: &Launch<'_>) {
        if self.is_empty() {
            self.thread = thread;
            self.blocking = blocking;
            self.is_legacy = launch.stream == RawStream::LEGACY;
        } else if self.thread != thread {
            self.thread = 0;
        }
        let begin = self.parameters.len();
        self.parameters.extend_from_slice(launch.parameters);
        self.launches.push(Collected {
            function: launch.function,
            grid: launch.grid,
            block: launch.block,
            shared: launch.shared,
            parameters: (begin, self.parameters.len()),
        });
    }

    pub fn clear(&mut self) {
        self.launches.clear();
        self.parameters.clear();
    }

    /// Returns the function of a launch.
    pub fn function(&self, place: usize) -> RawFunction {
        self.launches[place].function
    }

    /// Returns a launch, which is on the given stream.
    pub fn launch(&self, stream: RawStream, place: usize) -> Launch<'_> {
        let collected = &self.launches[place];
        let (begin, end) = collected.parameters;
        Launch {
            function: collected.function,
            stream,
            grid: collected.grid,
            block: collected.block,
            shared: collected.shared,
            attributes: &[],
            events: LaunchEvents::default(),
            parameters: &self.parameters[begin..end],
        }
    }
}
