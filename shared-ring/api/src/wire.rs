//! Types of the messages' fields, and the checks that generated decoders call.

use core::fmt;
use core::marker::PhantomData;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::handle::{Handle, HandleKind};
use crate::result::CuResult;

/// Bytes of a record's body: `MAX_RECORD` of the ring less its header.
pub const MESSAGE_LIMIT: usize = 36864 - 32;
/// Bytes of the payload of an answer slot.
pub const REPLY_LIMIT: usize = 4096;
/// Fence words of a session.
pub const FENCES: u32 = 49152;

/// Address in the device's address space: device memory, or arena memory, which has one address everywhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DevicePtr(pub u64);

/// Index of a fence word, below [`FENCES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fence(u32);

impl Fence {
    #[must_use]
    pub const fn new(index: u32) -> Option<Self> {
        if index < FENCES {
            Some(Self(index))
        } else {
            None
        }
    }

    #[must_use]
    pub const fn index(self) -> u32 {
        self.0
    }

    pub(crate) const fn to_wire(self) -> u32 {
        self.0
    }
}

/// Way in which a message is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Executed without an answer, unless it is sent with an answer slot.
    Record,
    /// Executed and answered in order.
    Request,
    /// Passed to the thread that serves the guest thread, which answers.
    Blocking,
}

/// Id, name and kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageInfo {
    pub id: u16,
    pub name: &'static str,
    pub kind: Kind,
}

/// Value that can be encoded: a message or an answer.
pub trait Encode {
    /// Calls `send` with slices whose concatenation is the body.
    ///
    /// # Errors
    /// A tail or the whole body is longer than declared; `send` is not called.
    fn encode<R>(&self, send: impl FnOnce(&[&[u8]]) -> R) -> Result<R, EncodeError>;
}

/// Value that can be decoded from bytes.
pub trait Decode<'a>: Sized {
    /// Decodes and checks a body.
    ///
    /// # Errors
    /// The first fault of the body.
    fn decode(body: &'a [u8]) -> Result<Self, DecodeError>;
}

/// Message of the table.
pub trait Message: Encode {
    const ID: u16;
    const NAME: &'static str;
    const KIND: Kind;
    /// Type of the answer; `()` for a status only.
    type Reply<'r>: Encode + Decode<'r>;
}

impl Encode for () {
    fn encode<R>(&self, send: impl FnOnce(&[&[u8]]) -> R) -> Result<R, EncodeError> {
        Ok(send(&[]))
    }
}

impl<'a> Decode<'a> for () {
    fn decode(body: &'a [u8]) -> Result<Self, DecodeError> {
        end("reply", body)
    }
}

/// Reason why a message does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EncodeError {
    /// A tail has more elements than declared.
    Tail {
        message: &'static str,
        tail: &'static str,
        count: usize,
        limit: u32,
    },
    /// All parts together exceed the limit of a record or an answer.
    Total {
        message: &'static str,
        bytes: usize,
        limit: usize,
    },
}

impl fmt::Display for EncodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tail {
                message,
                tail,
                count,
                limit,
            } => {
                write!(
                    f,
                    "{tail} of {message} has {count} elements, the limit is {limit}"
                )
            }
            Self::Total {
                message,
                bytes,
                limit,
            } => {
                write!(f, "{message} takes {bytes} bytes, the limit is {limit}")
            }
        }
    }
}

impl core::error::Error for EncodeError {}

/// Reason why a body is not a valid message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeError {
    UnknownMessage {
        id: u16,
    },
    /// Shorter than the fixed part.
    Short {
        message: &'static str,
        needed: usize,
        found: usize,
    },
    /// Bytes follow the last part.
    Long {
        message: &'static str,
        extra: usize,
    },
    /// A count exceeds its limit.
    Limit {
        message: &'static str,
        tail: &'static str,
        count: u32,
        limit: u32,
    },
    /// A count exceeds the elements in the body.
    Cut {
        message: &'static str,
        tail: &'static str,
        count: u32,
        found: usize,
    },
    /// A value is not a handle of the field's type.
    Handle {
        message: &'static str,
        field: &'static str,
        value: u64,
    },
    /// A value that the declaration excludes.
    Value {
        message: &'static str,
        field: &'static str,
        value: u64,
    },
}

impl DecodeError {
    /// Error that the program gets. `None` if only a hostile session sends such a body: the guest's library never
    /// does.
    #[must_use]
    pub const fn result(&self) -> Option<CuResult> {
        match self {
            Self::Handle { .. } => Some(CuResult::INVALID_HANDLE),
            Self::Value { .. } => Some(CuResult::INVALID_VALUE),
            Self::UnknownMessage { .. }
            | Self::Short { .. }
            | Self::Long { .. }
            | Self::Limit { .. }
            | Self::Cut { .. } => None,
        }
    }
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownMessage { id } => write!(f, "no message has the id {id}"),
            Self::Short {
                message,
                needed,
                found,
            } => {
                write!(f, "{message} needs {needed} bytes and has {found}")
            }
            Self::Long { message, extra } => write!(f, "{message} has {extra} bytes too many"),
            Self::Limit {
                message,
                tail,
                count,
                limit,
            } => {
                write!(
                    f,
                    "{tail} of {message} claims {count} elements, the limit is {limit}"
                )
            }
            Self::Cut {
                message,
                tail,
                count,
                found,
            } => {
                write!(
                    f,
                    "{tail} of {message} claims {count} elements in {found} bytes"
                )
            }
            Self::Handle {
                message,
                field,
                value,
            } => {
                write!(
                    f,
                    "{field} of {message} is {value:#x}, which is no such handle"
                )
            }
            Self::Value {
                message,
                field,
                value,
            } => {
                write!(f, "{field} of {message} is {value:#x}, which it cannot be")
            }
        }
    }
}

impl core::error::Error for DecodeError {}

/// Result of serving a message. An error means that the message was refused or has failed.
pub type Outcome<R> = Result<Served<R>, CuResult>;

/// State of a message that was not refused.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Served<R> {
    /// Executed, with this answer.
    Done(R),
    /// Passed to another thread, which will answer.
    Deferred,
}

/// Executes messages.
pub trait Server {
    /// Context of each message: slot, sequence.
    type Call;
}

/// Executes one kind of message. [`dispatch`](crate::dispatch) needs a server of all kinds.
pub trait Serve<M: Message>: Server {
    /// Executes the message, or passes it to another thread.
    ///
    /// # Errors
    /// Status of the answer.
    fn serve<'s>(&'s mut self, call: &Self::Call, message: &M) -> Outcome<M::Reply<'s>>;
}

/// Sends the answer, if there is one yet. An answer too long for its slot becomes `CUDA_ERROR_NOT_SUPPORTED`.
pub fn deliver<R: Encode>(
    outcome: Outcome<R>,
    answer: &mut impl FnMut(CuResult, &[&[u8]]),
) -> Dispatched {
    match outcome {
        Ok(Served::Done(reply)) => {
            if reply
                .encode(|parts| answer(CuResult::SUCCESS, parts))
                .is_err()
            {
                answer(CuResult::NOT_SUPPORTED, &[]);
            }
        }
        Ok(Served::Deferred) => return Dispatched::Deferred,
        Err(error) => answer(error, &[]),
    }
    Dispatched::Answered
}

/// Whether a message has been answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dispatched {
    Answered,
    Deferred,
}

/// Array in a message: elements of `T`, at any alignment, copied out one by one.
pub struct Items<'a, T> {
    bytes: &'a [u8],
    element: PhantomData<T>,
}

impl<'a, T: FromBytes + IntoBytes + Immutable> Items<'a, T> {
    #[must_use]
    pub fn new(items: &'a [T]) -> Self {
        Self {
            bytes: items.as_bytes(),
            element: PhantomData,
        }
    }

    #[must_use]
    pub const fn len(&self) -> usize {
        self.bytes.len() / size_of::<T>()
    }

    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub fn iter(&self) -> impl ExactSizeIterator<Item = T> + use<'a, T> {
        // Every chunk has the size of `T`, so no element is skipped.
        self.bytes
            .chunks_exact(size_of::<T>())
            .map(|chunk| T::read_from_bytes(chunk).unwrap_or_else(|_| T::new_zeroed()))
    }

    #[must_use]
    pub const fn as_bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

impl<T> Clone for Items<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Items<'_, T> {}

impl<T> PartialEq for Items<'_, T> {
    fn eq(&self, other: &Self) -> bool {
        self.bytes == other.bytes
    }
}

impl<T: FromBytes + IntoBytes + Immutable + fmt::Debug> fmt::Debug for Items<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

#[inline]
pub(crate) fn count(
    message: &'static str,
    tail: &'static str,
    count: usize,
    limit: u32,
) -> Result<u32, EncodeError> {
    u32::try_from(count)
        .ok()
        .filter(|count| *count <= limit)
        .ok_or(EncodeError::Tail {
            message,
            tail,
            count,
            limit,
        })
}

#[inline]
pub(crate) fn total(message: &'static str, bytes: usize, limit: usize) -> Result<(), EncodeError> {
    if bytes > limit {
        Err(EncodeError::Total {
            message,
            bytes,
            limit,
        })
    } else {
        Ok(())
    }
}

pub(crate) fn fixed<'a, T: FromBytes + KnownLayout + Immutable>(
    message: &'static str,
    body: &'a [u8],
) -> Result<(T, &'a [u8]), DecodeError> {
    T::read_from_prefix(body).map_err(|_| DecodeError::Short {
        message,
        needed: size_of::<T>(),
        found: body.len(),
    })
}

pub(crate) fn bytes<'a>(
    message: &'static str,
    tail: &'static str,
    count: u32,
    limit: u32,
    rest: &mut &'a [u8],
) -> Result<&'a [u8], DecodeError> {
    take(message, tail, count, limit, 1, rest)
}

pub(crate) fn items<'a, T>(
    message: &'static str,
    tail: &'static str,
    count: u32,
    limit: u32,
    rest: &mut &'a [u8],
) -> Result<Items<'a, T>, DecodeError> {
    let bytes = take(message, tail, count, limit, size_of::<T>(), rest)?;
    Ok(Items {
        bytes,
        element: PhantomData,
    })
}

fn take<'a>(
    message: &'static str,
    tail: &'static str,
    count: u32,
    limit: u32,
    size: usize,
    rest: &mut &'a [u8],
) -> Result<&'a [u8], DecodeError> {
    if count > limit {
        return Err(DecodeError::Limit {
            message,
            tail,
            count,
            limit,
        });
    }
    let cut = DecodeError::Cut {
        message,
        tail,
        count,
        found: rest.len(),
    };
    let length = usize::try_from(count)
        .ok()
        .and_then(|count| count.checked_mul(size))
        .ok_or(cut)?;
    let (taken, left) = rest.split_at_checked(length).ok_or(cut)?;
    *rest = left;
    Ok(taken)
}

pub(crate) fn end(message: &'static str, rest: &[u8]) -> Result<(), DecodeError> {
    if rest.is_empty() {
        Ok(())
    } else {
        Err(DecodeError::Long {
            message,
            extra: rest.len(),
        })
    }
}

pub(crate) fn value(message: &'static str, field: &'static str, value: u64) -> DecodeError {
    DecodeError::Value {
        message,
        field,
        value,
    }
}

pub(crate) fn nonzero(
    message: &'static str,
    field: &'static str,
    values: &[u32],
) -> Result<(), DecodeError> {
    if values.contains(&0) {
        Err(value(message, field, 0))
    } else {
        Ok(())
    }
}

pub(crate) fn handle<K: HandleKind>(
    message: &'static str,
    field: &'static str,
    value: u64,
) -> Result<Handle<K>, DecodeError> {
    Handle::from_wire(value).ok_or(DecodeError::Handle {
        message,
        field,
        value,
    })
}

pub(crate) fn minted<K: HandleKind>(
    message: &'static str,
    field: &'static str,
    value: u64,
) -> Result<Handle<K>, DecodeError> {
    handle(message, field, value).and_then(|handle: Handle<K>| {
        if handle.key().is_some() {
            Ok(handle)
        } else {
            Err(DecodeError::Handle {
                message,
                field,
                value,
            })
        }
    })
}

pub(crate) fn optional_handle<K: HandleKind>(
    message: &'static str,
    field: &'static str,
    value: u64,
) -> Result<Option<Handle<K>>, DecodeError> {
    if value == 0 {
        Ok(None)
    } else {
        handle(message, field, value).map(Some)
    }
}

pub(crate) fn fence(
    message: &'static str,
    field: &'static str,
    index: u32,
) -> Result<Fence, DecodeError> {
    Fence::new(index).ok_or_else(|| value(message, field, u64::from(index)))
}

pub(crate) fn optional_fence(
    message: &'static str,
    field: &'static str,
    index: u32,
) -> Result<Option<Fence>, DecodeError> {
    if index == u32::MAX {
        Ok(None)
    } else {
        fence(message, field, index).map(Some)
    }
}
