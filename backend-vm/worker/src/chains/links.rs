//! Chains of one stream.

use std::ops::Range;

use wormhole_device::{Device, RawChain, RawFunction, RawStream, Result};

use super::LONGEST;
use super::pending::Pending;

/// A stream, with the number of its device.
pub(super) type Key = (usize, RawStream);

/// Most chains of a stream.
const MOST: usize = 16;
/// Launches that a stream earns each kernel of a new chain with: making a chain takes as long as some fifty launches that it
/// saves.
const PRICE: usize = 64;
/// Launches after which those of a stream are collected.
const FIRST: usize = PRICE * LONGEST;
/// Most launches that count for new chains.
const SAVINGS: usize = 4096;

/// A chain, and what it was set to last.
#[derive(Debug)]
pub(super) struct Chain {
    raw: RawChain,
    functions: Vec<RawFunction>,
    /// Number of the stream's last chained part in which it was used.
    used: u64,
}

impl Chain {
    /// Sets the chain to collected launches, from one on.
    ///
    /// # Errors
    /// The driver takes no such kernel.
    pub fn set(
        &mut self,
        device: &dyn Device,
        pending: &Pending,
        from: usize,
    ) -> std::result::Result<(), RawFunction> {
        for (place, function) in self.functions.iter_mut().enumerate() {
            let launch = pending.launch(RawStream::LEGACY, from + place);
            if let Err(error) = device.set_kernel(&self.raw, place, &launch) {
                tracing::debug!("a kernel goes into no chain: {error}");
                return Err(launch.function);
            }
            *function = launch.function;
        }
        Ok(())
    }

    pub fn launch(&self, device: &dyn Device, stream: RawStream) -> Result<()> {
        device.launch_chain(&self.raw, stream)
    }

    fn is_of(&self, pending: &Pending, range: &Range<usize>) -> bool {
        self.functions.len() == range.len()
            && (self.functions.iter())
                .zip(range.clone())
                .all(|(function, place)| *function == pending.function(place))
    }
}

/// Chains of a stream.
#[derive(Debug)]
pub(super) struct Links {
    key: Key,
    chains: Vec<Chain>,
    /// Launches that no chain was made for yet.
    saved: usize,
    parts: u64,
    /// Whether the device has refused a chain.
    refused: bool,
}

impl Links {
    pub fn new(key: Key) -> Self {
        Self {
            key,
            chains: Vec::new(),
            saved: 0,
            parts: 0,
            refused: false,
        }
    }

    #[inline]
    pub fn key(&self) -> Key {
        self.key
    }

    /// Counts a launch behind which another record lies in the ring. Returns whether the stream has chains, or may have one.
    #[inline]
    pub fn earn(&mut self) -> bool {
        self.saved = SAVINGS.min(self.saved + 1);
        !self.chains.is_empty() || self.saved >= FIRST
    }

    /// Finds a chain for collected launches: one of their functions, a new one if it may be made, or that of the same length which
    /// was not used for longest. Returns its place, or `None` if there is none.
    pub fn place(
        &mut self,
        device: &dyn Device,
        pending: &Pending,
        range: Range<usize>,
        may_make: bool,
    ) -> Option<usize> {
        let length = range.len();
        let equal = self
            .chains
            .iter()
            .position(|chain| chain.is_of(pending, &range));
        match equal {
            Some(place) => Some(place),
            None if may_make && self.make(device, pending, range) => Some(self.chains.len() - 1),
            None => self.oldest(length),
        }
    }

    /// Returns the chain at a place, for its next launch.
    pub fn chain(&mut self, place: usize) -> &mut Chain {
        self.parts += 1;
        let chain = &mut self.chains[place];
        self.saved = SAVINGS.min(self.saved + chain.functions.len());
        chain.used = self.parts;
        chain
    }

    /// Returns whether the stream has earned a chain of this length.
    pub fn affords(&self, length: usize) -> bool {
        self.saved >= PRICE * length
    }

    /// Returns the number of chains that the stream has.
    pub fn made(&self) -> usize {
        self.chains.len()
    }

    /// Returns whether the stream has no chains, nor is about to have one.
    pub fn is_unused(&self) -> bool {
        self.chains.is_empty() && self.saved < FIRST
    }

    #[cold]
    fn make(&mut self, device: &dyn Device, pending: &Pending, range: Range<usize>) -> bool {
        if self.refused || self.chains.len() == MOST {
            return false;
        }
        let (_, stream) = self.key;
        let functions = range.clone().map(|place| pending.function(place)).collect();
        let kernels: Vec<_> = range.map(|place| pending.launch(stream, place)).collect();
        match device.create_chain(&kernels) {
            Ok(raw) => {
                self.saved = 0;
                self.chains.push(Chain {
                    raw,
                    functions,
                    used: 0,
                });
                true
            }
            Err(error) => {
                tracing::debug!("no chain of {} launches: {error}", kernels.len());
                self.refused = true;
                false
            }
        }
    }

    fn oldest(&self, length: usize) -> Option<usize> {
        let chains = self.chains.iter().enumerate();
        let alike = chains.filter(|(_, chain)| chain.functions.len() == length);
        alike
            .min_by_key(|(_, chain)| chain.used)
            .map(|(place, _)| place)
    }

    /// Destroys the chains. Their launches still run.
    pub fn end(self, device: &dyn Device) {
        for chain in self.chains {
            if let Err(error) = device.destroy_chain(chain.raw) {
                tracing::debug!("destroying a chain: {error}");
            }
        }
    }
}
