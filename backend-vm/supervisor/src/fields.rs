//! Decoder of the fields of a message between the supervisor's processes, and the fields of a process's end.

use wormhole_sandbox::Ending;

/// The rest of a message's bytes, read from the front.
pub struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    fn bytes<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*bytes)
    }

    pub fn number(&mut self) -> Option<u64> {
        self.bytes().map(u64::from_le_bytes)
    }

    pub fn half(&mut self) -> Option<u32> {
        self.bytes().map(u32::from_le_bytes)
    }

    pub fn signed(&mut self) -> Option<i32> {
        self.bytes().map(i32::from_le_bytes)
    }

    pub fn byte(&mut self) -> Option<u8> {
        self.bytes().map(|[byte]| byte)
    }

    /// Takes all remaining bytes as numbers.
    pub fn numbers(&mut self) -> Option<Vec<u64>> {
        let (numbers, rest) = std::mem::take(&mut self.0).as_chunks::<8>();
        let numbers = numbers.iter().map(|number| u64::from_le_bytes(*number));
        rest.is_empty().then(|| numbers.collect())
    }

    /// Takes all remaining bytes as text.
    pub fn text(&mut self) -> Option<String> {
        let bytes: &'a [u8] = std::mem::take(&mut self.0);
        std::str::from_utf8(bytes).ok().map(str::to_owned)
    }

    /// Takes the output of [`ending`]: how a process ended, and whether for lack of memory.
    pub fn ending(&mut self) -> Option<(Ending, bool)> {
        let value = self.signed()?;
        let ending = match self.byte()? {
            0 => Ending::Exited(value),
            1 => Ending::Signalled(value),
            _ => return None,
        };
        Some((ending, self.byte()? != 0))
    }

    pub fn end(&self) -> Option<()> {
        self.0.is_empty().then_some(())
    }
}

/// Encodes how a process ended, and whether for lack of memory.
pub fn ending(ending: Ending, out_of_memory: bool) -> [u8; 6] {
    let (kind, value) = match ending {
        Ending::Exited(status) => (0, status),
        Ending::Signalled(signal) => (1, signal),
    };
    let [a, b, c, d] = value.to_le_bytes();
    [a, b, c, d, kind, u8::from(out_of_memory)]
}
