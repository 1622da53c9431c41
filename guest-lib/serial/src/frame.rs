//! Frames on the port: a byte for the kind, a number of four bytes, and the rest of the kind. Integers are little-endian.
//!
//! [`END`] follows each frame and is nowhere else (RFC 1055), so that a reader finds the next frame behind one that is not
//! whole: an agent may end, and a guest may restart, in the middle of one.

/// Version of the protocol.
pub const VERSION: u32 = 1;
/// Most bytes of a stream in one frame.
pub const MAX_DATA: usize = 4096;
/// Bytes of kind and number.
const HEADER: usize = 5;
/// Most bytes of a frame before it is escaped.
const MAX_FRAME: usize = HEADER + MAX_DATA;

const END: u8 = 0xc0;
const ESCAPE: u8 = 0xdb;
/// After [`ESCAPE`], in the place of [`END`].
const ESCAPED_END: u8 = 0xdc;
/// After [`ESCAPE`], in the place of [`ESCAPE`].
const ESCAPED_ESCAPE: u8 = 0xdd;

const HELLO: u8 = 1;
const OPEN: u8 = 2;
const DATA: u8 = 3;
const CREDIT: u8 = 4;
const CLOSE: u8 = 5;

/// A frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame<'a> {
    /// The agent begins anew, without streams. The host answers with its own version and the same number.
    Hello { version: u32, nonce: u64 },
    /// A process has connected. The agent counts streams from 1 on.
    Open { stream: u32 },
    /// At least one byte of a stream, and not more than the receiver has granted.
    Data { stream: u32, bytes: &'a [u8] },
    /// The receiver of a stream takes so many bytes more.
    Credit { stream: u32, bytes: u32 },
    /// The stream has ended in both directions.
    Close { stream: u32 },
}

/// The bytes between two [`END`]s are no frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the bytes on the port are no frame")]
pub struct Malformed;

impl<'a> Frame<'a> {
    /// Parses the bytes of a frame.
    ///
    /// # Errors
    /// The kind is unknown, or does not have this length.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let (&kind, rest) = bytes.split_first().ok_or(Malformed)?;
        let (number, rest) = rest.split_first_chunk().ok_or(Malformed)?;
        let stream = u32::from_le_bytes(*number);
        match (kind, rest) {
            (HELLO, rest) => Ok(Self::Hello {
                version: stream,
                nonce: u64::from_le_bytes(rest.try_into().map_err(|_| Malformed)?),
            }),
            (OPEN, []) => Ok(Self::Open { stream }),
            (DATA, bytes @ [_, ..]) if bytes.len() <= MAX_DATA => Ok(Self::Data { stream, bytes }),
            (CREDIT, rest) => Ok(Self::Credit {
                stream,
                bytes: u32::from_le_bytes(rest.try_into().map_err(|_| Malformed)?),
            }),
            (CLOSE, []) => Ok(Self::Close { stream }),
            _ => Err(Malformed),
        }
    }

    /// Appends the frame as it is on the port.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let (credit, nonce);
        let (kind, number, rest): (_, _, &[u8]) = match *self {
            Self::Hello {
                version,
                nonce: number,
            } => {
                // Ends a frame that is not whole.
                out.push(END);
                nonce = number.to_le_bytes();
                (HELLO, version, &nonce)
            }
            Self::Open { stream } => (OPEN, stream, &[]),
            Self::Data { stream, bytes } => (DATA, stream, bytes),
            Self::Credit { stream, bytes } => {
                credit = bytes.to_le_bytes();
                (CREDIT, stream, &credit)
            }
            Self::Close { stream } => (CLOSE, stream, &[]),
        };
        let header = std::iter::once(kind).chain(number.to_le_bytes());
        for byte in header.chain(rest.iter().copied()) {
            match byte {
                END => out.extend([ESCAPE, ESCAPED_END]),
                ESCAPE => out.extend([ESCAPE, ESCAPED_ESCAPE]),
                byte => out.push(byte),
            }
        }
        out.push(END);
    }
}

/// Finds frames in the bytes of the port.
#[derive(Debug, Default)]
pub struct Decoder {
    /// Bytes of the frame that has not ended.
    frame: Vec<u8>,
    is_escaped: bool,
    /// Whether the frame is malformed, so that its bytes are not kept.
    is_malformed: bool,
    /// Whether `frame` was returned.
    is_returned: bool,
}

impl Decoder {
    /// Takes bytes up to the end of the next frame and returns that; `None` once all bytes are taken. Skips an
    /// empty one.
    pub fn next(&mut self, bytes: &mut &[u8]) -> Option<Result<Frame<'_>, Malformed>> {
        if std::mem::take(&mut self.is_returned) {
            self.frame.clear();
        }
        while let Some((&byte, rest)) = bytes.split_first() {
            *bytes = rest;
            let byte = match (byte, std::mem::take(&mut self.is_escaped)) {
                (END, is_escaped) => {
                    let is_malformed = std::mem::take(&mut self.is_malformed) || is_escaped;
                    if self.frame.is_empty() && !is_malformed {
                        continue;
                    }
                    self.is_returned = true;
                    return Some(match is_malformed {
                        true => Err(Malformed),
                        false => Frame::decode(&self.frame),
                    });
                }
                (ESCAPE, false) => {
                    self.is_escaped = true;
                    continue;
                }
                (byte, false) => Some(byte),
                (ESCAPED_END, true) => Some(END),
                (ESCAPED_ESCAPE, true) => Some(ESCAPE),
                (_, true) => None,
            };
            match byte {
                Some(byte) if self.frame.len() < MAX_FRAME => self.frame.push(byte),
                _ => self.is_malformed = true,
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the bytes of each frame, and what is malformed.
    fn frames(decoder: &mut Decoder, mut bytes: &[u8]) -> Vec<Result<Vec<u8>, Malformed>> {
        let mut found = Vec::new();
        while let Some(frame) = decoder.next(&mut bytes) {
            found.push(frame.map(|frame| encoded(&frame)));
        }
        found
    }

    fn encoded(frame: &Frame<'_>) -> Vec<u8> {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        bytes
    }

    #[test]
    fn lengths_must_be_those_of_the_kind() {
        let of = |kind: u8, rest: usize| [vec![kind, 1, 0, 0, 0], vec![7; rest]].concat();
        for (kind, lengths) in [
            (HELLO, &[8][..]),
            (OPEN, &[0]),
            (DATA, &[1, 2, 4, 8, 9, MAX_DATA]),
            (CREDIT, &[4]),
            (CLOSE, &[0]),
            (0, &[]),
            (CLOSE + 1, &[]),
        ] {
            for length in [0, 1, 2, 4, 8, 9, MAX_DATA, MAX_DATA + 1] {
                let bytes = of(kind, length);
                let is_frame = Frame::decode(&bytes).is_ok();
                assert_eq!(is_frame, lengths.contains(&length), "{kind} {length}");
            }
        }
        assert_eq!(Frame::decode(&[]), Err(Malformed));
        assert_eq!(Frame::decode(&[CLOSE, 0, 0, 0]), Err(Malformed));
    }

    #[test]
    fn a_frame_behind_one_that_is_not_whole_or_too_long_is_found() {
        let hello = Frame::Hello {
            version: VERSION,
            nonce: 0xdbdc_c0c0,
        };
        let hello = encoded(&hello);
        let data = encoded(&Frame::Data {
            stream: 7,
            bytes: &[ESCAPE; 9],
        });
        for cut in 1..data.len() - 1 {
            let bytes = [&data[..cut], &hello].concat();
            let found = frames(&mut Decoder::default(), &bytes);
            assert_eq!(found.last(), Some(&Ok(hello.clone())), "{cut}");
        }
        let long = [vec![7; 3 * MAX_FRAME], hello.clone()].concat();
        let found = frames(&mut Decoder::default(), &long);
        assert_eq!(found, [Err(Malformed), Ok(hello)]);
    }

    proptest! {
        #[test]
        fn frames_survive_any_cut_of_the_bytes(
            parts in prop::collection::vec((any::<u32>(), prop::collection::vec(any::<u8>(), 1..64)), 1..8),
            size in 1_usize..64,
        ) {
            let sent: Vec<Vec<u8>> = parts
                .iter()
                .map(|(stream, bytes)| encoded(&Frame::Data { stream: *stream, bytes }))
                .collect();
            let mut decoder = Decoder::default();
            let bytes = sent.concat();
            let found = bytes.chunks(size).flat_map(|chunk| frames(&mut decoder, chunk));
            let found: Vec<_> = found.collect();
            prop_assert_eq!(found, sent.into_iter().map(Ok).collect::<Vec<_>>());
        }

        #[test]
        fn any_bytes_are_frames_or_malformed(bytes in prop::collection::vec(any::<u8>(), 0..512)) {
            let mut decoder = Decoder::default();
            for frame in frames(&mut decoder, &bytes).into_iter().flatten() {
                prop_assert_eq!(frames(&mut Decoder::default(), &frame), [Ok(frame)]);
            }
            prop_assert!(decoder.frame.len() <= MAX_FRAME);
        }
    }
}
