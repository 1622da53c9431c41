//! Launches that the executor has collected.

use wormhole_device::{Launch, LaunchEvents, RawFunction, RawStream};

use super::LONGEST;
use super::links::Key;

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
    key: Key,
    launches: Vec<Collected>,
    parameters: Vec<u8>,
}

impl Pending {
    pub fn new() -> Self {
        Self {
            key: (0, RawStream::LEGACY),
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

    /// Returns the stream of the launches.
    #[inline]
    pub fn key(&self) -> Key {
        self.key
    }

    #[inline]
    pub fn push(&mut self, key: Key, launch: &Launch<'_>) {
        let begin = self.parameters.len();
        self.parameters.extend_from_slice(launch.parameters);
        self.key = key;
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

    /// Returns a launch.
    pub fn launch(&self, place: usize) -> Launch<'_> {
        let collected = &self.launches[place];
        let (begin, end) = collected.parameters;
        Launch {
            function: collected.function,
            stream: self.key.1,
            grid: collected.grid,
            block: collected.block,
            shared: collected.shared,
            attributes: &[],
            events: LaunchEvents::default(),
            parameters: &self.parameters[begin..end],
        }
    }
}
