//! Context limits (`cuCtxGetLimit`, `cuCtxSetLimit`), and the part of the L2 cache set aside for
//! persisting lines.
//!
//! This part of the cache belongs to the device: while other tenants use the device, no tenant may
//! set one aside, and resetting it has no effect.

use wormhole_api::constants::limit::{
    MALLOC_HEAP_SIZE, MAX, PERSISTING_L2_CACHE_SIZE, PRINTF_FIFO_SIZE,
};
use wormhole_api::{
    ContextGetLimit, ContextGetLimitReply, ContextSetLimit, ContextSetLimitReply, CuResult,
    Outcome, ResetPersistingL2, Serve, Served,
};

use super::{Answer, Call, Session};

/// Limit on the printf buffer: the worker holds the text of a whole buffer.
const MOST_PRINTF: u64 = 64 << 20;

/// Refuses numbers that are no limits: the driver (580) crashes on some unknown function
/// attributes, so unknown limits do not reach it either.
fn check_limit(limit: u32) -> wormhole_device::Result<()> {
    match limit {
        0..MAX => Ok(()),
        _ => Err(CuResult::INVALID_VALUE),
    }
}

impl Session {
    /// Checks whether a limit may be set to a value.
    fn check_value(&self, call: &Call, limit: u32, value: u64) -> wormhole_device::Result<()> {
        check_limit(limit)?;
        let most = match limit {
            PRINTF_FIFO_SIZE => MOST_PRINTF,
            // No heap can be larger than the device's memory.
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
            move |device| device.context_get_limit(limit),
            |_, value| Answer::reply(&ContextGetLimitReply { value }),
        )
    }
}

impl Serve<ContextSetLimit> for Session {
    fn serve(&mut self, call: &Call, message: &ContextSetLimit) -> Outcome<ContextSetLimitReply> {
        let (limit, value) = (message.limit, message.value);
        self.check_value(call, limit, value)?;
        // Kernels of a graph that was made before may have the limits of that time.
        self.chains.forget_all();
        self.ask(
            call,
            self.here(call),
            move |device| {
                device.set_limit(limit, value)?;
                device.context_get_limit(limit)
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
        self.order(call, self.here(call), |device| device.reset_persisting_l2())
    }
}
