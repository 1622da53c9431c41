//! Decoder of the fields of a message between the supervisor's processes.

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

    pub fn end(&self) -> Option<()> {
        self.0.is_empty().then_some(())
    }
}
