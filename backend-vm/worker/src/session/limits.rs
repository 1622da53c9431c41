//! Context limits (`cuCtxGetLimit`, `cuCtxSetLimit`), and the part of the L2 cache that is set aside for lines that
//! persist.
//!
//! That part is the device's: while other tenants use the device, none of them gets one, and resetting it does nothing.

use wormhole_api::constants::limit::{
    END, MALLOC_HEAP_SIZE, PERSISTING_L2_CACHE_SIZE, PRINTF_FIFO_SIZE,
};
use wormhole_api::{
    ContextGetLimit, ContextGetLimitReply, ContextSetLimit, ContextSetLimitReply, CuResult,
    Outcome, ResetPersistingL2, Serve, Served,
};

use super::{Answer, Call, Session};

/// The worker holds the text of a whole buffer.
const MOST_PRINTF: u64 = 64 << 20;

/// Refuses numbers that are no limits: a driver dies of some numbers that it does not know (580, of attributes of
/// functions).
fn check_limit(limit: u32) -> wormhole_device::Result<()> {
    match limit {
        0..END => Ok(()),
        _ => Err(CuResult::INVALID_VALUE),
    }
}

impl Session {
    /// Whether a limit may be raised to a value.
    fn check_value(&self, call: &Call, limit: u32, value: u64) -> wormhole_device::Result<()> {
        check_limit(limit)?;
        let most = match limit {
            PRINTF_FIFO_SIZE => MOST_PRINTF,
            // No device has more than its memory.
            MALLOC_HEAP_SIZE => self.descriptions[call.device].total_memory(),
            PERSISTING_L2_CACHE_SIZE if self.counters.has_neighbours() => {
                return Err(CuResult::UNSUPPORTED_LIMIT);
            }
            _ => return Ok(()),
        };
        if value <= most {
            Ok(())
        } else {
            Err(CuResult::OUT_OF_MEMORY)
        }
    }
}

impl Serve<ContextGetLimit> for Session {
    fn serve(&mut self, call: &Call, message: &ContextGetLimit) -> Outcome<ContextGetLimitReply> {
        let limit = message.limit;
        check_limit(limit)?;
        if limit == PERSISTING_L2_CACHE_SIZE && self.counters.has_neighbours() {
            return Ok(Served::Done(ContextGetLimitReply { value: 0 }));
        }
        self.ask(
            call,
            self.here(call),
            move |device| device.limit(limit),
            |_, value| Answer::reply(&ContextGetLimitReply { value }),
        )
    }
}

impl Serve<ContextSetLimit> for Session {
    fn serve(&mut self, call: &Call, message: &ContextSetLimit) -> Outcome<ContextSetLimitReply> {
        let (limit, value) = (message.limit, message.value);
        self.check_value(call, limit, value)?;
        self.ask(
            call,
            self.here(call),
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
            self.here(call),
            |device| device.reset_persisting_l2(),
            |_, ()| Answer::done(),
        )
    }
}
