#![expect(
    clippy::needless_update,
    reason = "some fixed parts have reserved fields, some have none"
)]

#[cfg(feature = "alloc")]
use alloc::{vec, vec::Vec};

use zerocopy::{FromBytes, IntoBytes};

use super::{
    ArenaDenied, ArenaRequest, ArenaRun, ArenaWithin, Attach, ControlError, Exits, Fetch, Fetched,
    FileMemory, Grant, HEADER_BYTES, Header, HelloFixed, MAX_CONTROL_BODY, ObservationFixed,
    Observe, ProcessNumber, ReadyFixed, RefusedFixed, Share, Shared, Stream, UsageFixed, WindowRun,
};

/// Declares the messages once: the enum, the kinds, the decoder and the encoder.
macro_rules! messages {
    (
        empty { $($(#[$empty_doc:meta])* $empty:ident = $empty_kind:literal,)* }
        fixed { $($(#[$fixed_doc:meta])* $fixed:ident($fixed_body:ty) = $fixed_kind:literal,)* }
        text {
            $($(#[$text_doc:meta])* $text:ident {
                $($field:ident: $field_type:ty),*; $text_field:ident
            } = $text_kind:literal as $text_body:ident.$length:ident,)*
        }
        plain { $($(#[$plain_doc:meta])* $plain:ident = $plain_kind:literal,)* }
    ) => {
        /// A control message. Texts borrow from the decoded bytes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum Message<'a> {
            $($(#[$empty_doc])* $empty,)*
            $($(#[$fixed_doc])* $fixed($fixed_body),)*
            $($(#[$text_doc])* $text {
                $(
                    #[doc = concat!("See [`", stringify!($text_body), "`](super::", stringify!($text_body), ").")]
                    $field: $field_type,
                )*
                /// The text behind the fixed part.
                $text_field: &'a str,
            },)*
            $($(#[$plain_doc])* $plain(&'a str),)*
        }

        impl<'a> Message<'a> {
            /// Returns the kind that the message's header carries.
            #[must_use]
            pub const fn kind(&self) -> u16 {
                match self {
                    $(Self::$empty => $empty_kind,)*
                    $(Self::$fixed(_) => $fixed_kind,)*
                    $(Self::$text { .. } => $text_kind,)*
                    $(Self::$plain(_) => $plain_kind,)*
                }
            }

            /// Returns the message's name.
            #[must_use]
            pub const fn name(&self) -> &'static str {
                match self {
                    $(Self::$empty => stringify!($empty),)*
                    $(Self::$fixed(_) => stringify!($fixed),)*
                    $(Self::$text { .. } => stringify!($text),)*
                    $(Self::$plain(_) => stringify!($plain),)*
                }
            }

            /// Decodes the body of a message of this kind.
            ///
            /// # Errors
            /// See [`ControlError`]. Every byte string decodes to a message or an error.
            pub fn decode(kind: u16, body: &'a [u8]) -> Result<Self, ControlError> {
                let length = body.len();
                if length > MAX_CONTROL_BODY {
                    return Err(ControlError::TooLong { kind, length, limit: MAX_CONTROL_BODY });
                }
                match kind {
                    $($empty_kind => {
                        exactly(stringify!($empty), length, 0)?;
                        Ok(Self::$empty)
                    })*
                    $($fixed_kind => {
                        let (fixed, rest) = split::<$fixed_body>(stringify!($fixed), body)?;
                        exactly(stringify!($fixed), length, length - rest.len())?;
                        Ok(Self::$fixed(fixed))
                    })*
                    $($text_kind => {
                        let (fixed, rest) = split::<$text_body>(stringify!($text), body)?;
                        let announced = (length - rest.len()).saturating_add(fixed.$length as usize);
                        exactly(stringify!($text), length, announced)?;
                        let $text_body { $($field,)* .. } = fixed;
                        Ok(Self::$text { $($field,)* $text_field: text(stringify!($text), rest)? })
                    })*
                    $($plain_kind => Ok(Self::$plain(text(stringify!($plain), body)?)),)*
                    _ => Err(ControlError::Kind { kind, length }),
                }
            }

            /// Writes header and body to the start of `frame` and returns the number of bytes written.
            /// [`super::MAX_FRAME`] bytes hold any message.
            ///
            /// # Errors
            /// The message exceeds the frame or the limit of a body.
            pub fn encode(&self, frame: &mut [u8]) -> Result<usize, ControlError> {
                match self {
                    $(Self::$empty => self.write(frame, &[], ""),)*
                    $(Self::$fixed(fixed) => self.write(frame, fixed.as_bytes(), ""),)*
                    $(Self::$text { $($field,)* $text_field } => {
                        let fixed = $text_body {
                            $($field: *$field,)*
                            $length: u32::try_from($text_field.len()).unwrap_or(u32::MAX),
                            ..$text_body::default()
                        };
                        self.write(frame, fixed.as_bytes(), $text_field)
                    })*
                    $(Self::$plain(text) => self.write(frame, &[], text),)*
                }
            }
        }
    };
}

messages! {
    empty {
        /// Guest → supervisor: all granted segments are mapped.
        Mapped = 2,
        /// Guest → supervisor: the granted bands collide with mappings of the process.
        Unmappable = 3,
        /// Guest → supervisor → worker: the ring holds records and its consumer is parked.
        Doorbell = 6,
        /// Supervisor → launcher: the window is attached and the device is ready.
        Attached = 35,
        /// Client → supervisor, instead of attaching a window: a request for the usage by tenants. The next request may
        /// follow the answer. Launcher → supervisor, behind a window: a request for the usage by its own tenant.
        AskUsage = 39,
        /// Supervisor → launcher: a request for the number of exits of the guest's vCPUs.
        AskExits = 41,
        /// Worker → supervisor: the session is mapped and the worker serves its ring.
        Assigned = 49,
        /// Supervisor → worker: write the state of the device's queues to the log.
        Dump = 61,
    }
    fixed {
        /// Guest → supervisor: a request for more arena.
        ArenaRequest(ArenaRequest) = 4,
        /// Guest → supervisor: this run is no longer in use.
        ArenaReturn(ArenaRun) = 5,
        /// Guest → supervisor, after a grant with [`super::FEATURE_PROCESS`]: the process id.
        Process(ProcessNumber) = 7,
        /// Guest → supervisor, instead of a hello: a request for a device's facts, without a session. The next request
        /// may follow the answer.
        Observe(Observe) = 8,
        /// Guest → supervisor, after a grant with [`super::FEATURE_WITHIN`]: a request for more arena in a part of the
        /// window. Answered as [`Message::ArenaRequest`].
        ArenaWithin(ArenaWithin) = 9,
        /// Supervisor → guest: a session. On a local stream the session file's descriptor travels with it.
        Grant(Grant) = 16,
        /// Supervisor → guest: a run of arena segments.
        ArenaGrant(ArenaRun) = 18,
        /// Supervisor → guest: the arena request is denied.
        ArenaDenied(ArenaDenied) = 19,
        /// Launcher → supervisor, on a tenant stream: the window.
        Attach(Attach) = 32,
        /// Launcher → supervisor, on a tenant stream: a guest process's control stream.
        Stream(Stream) = 33,
        /// Launcher → supervisor: this run is mapped for the guest.
        WindowMapped(WindowRun) = 36,
        /// Supervisor → launcher: map this run for the guest. The session file's descriptor travels with it.
        WindowMap(WindowRun) = 37,
        /// Supervisor → launcher: unmap this run from the guest; no session owns it any more.
        WindowUnmap(WindowRun) = 38,
        /// Launcher → supervisor: the answer to [`Message::AskExits`].
        Exits(Exits) = 42,
        /// Launcher → supervisor, behind a window that is not static: the memory of the guest's file system for shared
        /// memory. Its file travels with the message, a memfd that cannot be resized.
        FileMemory(FileMemory) = 43,
        /// Supervisor → worker: serve this session. The descriptors of the session file, of the counter pages and of
        /// the neighbours' page travel with it, and with [`super::FEATURE_FILES`] that of a socket for file
        /// descriptors, or with [`super::FEATURE_FILE_MEMORY`] that of the guest's file memory.
        Assign(Grant) = 48,
        /// Supervisor → worker: map and register this run.
        ArenaAdd(ArenaRun) = 50,
        /// Supervisor → worker: unregister and unmap this run.
        ArenaRemove(ArenaRun) = 51,
        /// Worker → supervisor: this run is mapped and registered.
        ArenaAdded(ArenaRun) = 53,
        /// Worker → supervisor: this run is unregistered and unmapped.
        ArenaRemoved(ArenaRun) = 54,
        /// Worker → supervisor: this run cannot be registered and is not in use.
        ArenaRefused(ArenaRun) = 55,
        /// Worker → supervisor: share this object with the tenant's other processes.
        Share(Share) = 56,
        /// Supervisor → worker: the shared object's name.
        Shared(Shared) = 57,
        /// Worker → supervisor: look up the shared object with this name.
        Fetch(Fetch) = 58,
        /// Supervisor → worker: the object that another worker has shared, or an error.
        Fetched(Fetched) = 59,
        /// Worker → supervisor: the shared object with this name is gone. Answered once the supervisor has closed its
        /// descriptor.
        Unshare(Fetch) = 60,
    }
    text {
        /// Guest → supervisor: the first message.
        Hello {
            bootstrap_version: u32, protocol_hash: u64, features: u64; environment
        } = 1 as HelloFixed.env_len,
        /// Supervisor → guest: no session, with the reason.
        Refused { code: u32; reason } = 17 as RefusedFixed.text_len,
        /// Supervisor → guest: the answer to [`Message::Observe`].
        Observation {
            device: u32, devices: u32, more: u32; facts
        } = 20 as ObservationFixed.text_len,
        /// Supervisor → client or launcher: a part of the answer to [`Message::AskUsage`].
        Usage { more: u32; tenants } = 40 as UsageFixed.text_len,
        /// Worker → supervisor: ready to serve a session.
        Ready { protocol_hash: u64; device } = 52 as ReadyFixed.text_len,
    }
    plain {
        /// Supervisor → launcher: the report of a session that ended, as JSON.
        SessionReport = 34,
    }
}

impl Message<'_> {
    fn write(&self, frame: &mut [u8], fixed: &[u8], text: &str) -> Result<usize, ControlError> {
        encode_frame(self.kind(), self.name(), frame, &[fixed, text.as_bytes()])
    }

    /// Encodes the message.
    ///
    /// ```
    /// use wormhole_ring::control::{HEADER_BYTES, Header, Message};
    /// let frame = Message::Refused { code: 2, reason: "quota: 3 of 3 sessions" }.to_vec().unwrap();
    /// let (header, body) = frame.split_first_chunk::<HEADER_BYTES>().unwrap();
    /// let header = Header::decode(header).unwrap();
    /// assert_eq!(header.body_len, body.len());
    /// let message = Message::decode(header.kind, body).unwrap();
    /// assert_eq!(message, Message::Refused { code: 2, reason: "quota: 3 of 3 sessions" });
    /// ```
    ///
    /// # Errors
    /// The message exceeds the limit of a body.
    #[cfg(feature = "alloc")]
    pub fn to_vec(&self) -> Result<Vec<u8>, ControlError> {
        let mut frame = vec![0; super::MAX_FRAME];
        let length = self.encode(&mut frame)?;
        frame.truncate(length);
        // Frames wait in queues until their readers take them.
        frame.shrink_to_fit();
        Ok(frame)
    }
}

/// Writes a header for `kind` and the concatenation of `parts` to `frame`. Returns the number of bytes written.
///
fn encode_frame(
    kind: u16,
    message: &'static str,
    frame: &mut [u8],
    parts: &[&[u8]],
) -> Result<usize, ControlError> {
    let body_len = parts
        .iter()
        .map(|part| part.len())
        .fold(0, usize::saturating_add);
    if body_len > MAX_CONTROL_BODY {
        return Err(ControlError::TooLong {
            kind,
            length: body_len,
            limit: MAX_CONTROL_BODY,
        });
    }
    let length = HEADER_BYTES + body_len;
    let limit = frame.len();
    let Some((header, mut rest)) = frame
        .get_mut(..length)
        .and_then(<[u8]>::split_first_chunk_mut::<HEADER_BYTES>)
    else {
        return Err(ControlError::Buffer {
            message,
            length,
            limit,
        });
    };
    *header = Header { kind, body_len }.encode();
    for part in parts {
        let (to, after) = rest.split_at_mut(part.len());
        to.copy_from_slice(part);
        rest = after;
    }
    Ok(length)
}

fn exactly(message: &'static str, length: usize, expected: usize) -> Result<(), ControlError> {
    if length == expected {
        Ok(())
    } else {
        Err(ControlError::Length {
            message,
            length,
            expected,
        })
    }
}

fn split<'a, T: FromBytes>(
    message: &'static str,
    body: &'a [u8],
) -> Result<(T, &'a [u8]), ControlError> {
    T::read_from_prefix(body).map_err(|_| ControlError::Length {
        message,
        length: body.len(),
        expected: size_of::<T>(),
    })
}

fn text<'a>(message: &'static str, bytes: &'a [u8]) -> Result<&'a str, ControlError> {
    core::str::from_utf8(bytes).map_err(|error| ControlError::Text {
        message,
        length: bytes.len(),
        valid: error.valid_up_to(),
    })
}
