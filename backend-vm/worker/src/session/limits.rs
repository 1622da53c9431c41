//! Context limits (`cuCtxGetLimit`, `cuCtxSetLimit`), and the part of the L2 cache that is set aside for lines that
//! persist.
//!
//! That part is the device's: while other tenants use the device, none of them gets one, and resetting it does nothing.

use wormhole_api::{
    ContextGetLimit, ContextGetLimitReply, ContextSetLimit, ContextSetLimitReply, Outcome,
    ResetPersistingL2, Serve, Served,
};
use wormhole_device::CuError;

use super::{Answer, Call, Session, to_result};

/// The worker holds the text of a whole buffer.
const PRINTF_FIFO_SIZE: u32 = 1;
const MOST_PRINTF: u64 = 64 << 20;
/// No device has more than its memory.
const MALLOC_HEAP_SIZE: u32 = 2;
const PERSISTING_L2_CACHE_SIZE: u32 = 6;
/// One past the last `CUlimit` of CUDA 13.0. A driver dies of some numbers that it does not know (580, of attributes of
/// functions), so no other reaches it.
const END: u32 = 10;

fn check_limit(limit: u32) -> wormhole_device::Result<()> {
    match limit {
        0..END => Ok(()),
        _ => Err(CuError::INVALID_VALUE),
    }
}

impl Session {
    /// Whether a limit may be raised to a value.
    fn check_value(&self, limit: u32, value: u64) -> wormhole_device::Result<()> {
        check_limit(limit)?;
        let most = match limit {
            PRINTF_FIFO_SIZE => MOST_PRINTF,
            MALLOC_HEAP_SIZE => self.descriptions[self.on].total_memory(),
            PERSISTING_L2_CACHE_SIZE if self.counters.has_neighbours() => {
                return Err(CuError::UNSUPPORTED_LIMIT);
            }
            _ => return Ok(()),
        };
        if value <= most {
            Ok(())
        } else {
            Err(CuError::OUT_OF_MEMORY)
        }
    }
}

impl Serve<ContextGetLimit> for Session {
    fn serve(&mut self, call: &Call, message: &ContextGetLimit) -> Outcome<ContextGetLimitReply> {
        let limit = message.limit;
        if let Err(error) = check_limit(limit) {
            return Err(to_result(error));
        }
        if limit == PERSISTING_L2_CACHE_SIZE && self.counters.has_neighbours() {
            return Ok(Served::Done(ContextGetLimitReply { value: 0 }));
        }
        self.ask(
            call,
            move |device| device.limit(limit),
            |_, value| Answer::reply(&ContextGetLimitReply { value }),
        )
    }
}

impl Serve<ContextSetLimit> for Session {
    fn serve(&mut self, call: &Call, message: &ContextSetLimit) -> Outcome<ContextSetLimitReply> {
        let (limit, value) = (message.limit, message.value);
        if let Err(error) = self.check_value(limit, value) {
            return Err(to_result(error));
        }
        self.ask(
            call,
            move |device| {
                device.set_limit(limit, value)?;
                device.limit(limit)
            },
            |_, value| Answer::reply(&ContextSetLimitReply { value }),
        )
    }
}

impl Serve<ResetPersistingL2> for Session {
    fn serve(&mut self, call: &Call, _: &ResetPersistingL2) -> Outcome<()> {
        if self.counters.has_neighbours() {
            return Ok(Served::Done(()));
        }
        self.ask(
            call,
            |device| device.reset_persisting_l2(),
            |_, ()| Answer::done(),
        )
    }
}
