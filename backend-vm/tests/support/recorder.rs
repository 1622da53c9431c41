//! A device that executes nothing and remembers in which order it was asked.
//!
//! Values and flags of calls are numbers that the test chose; they are entered in the order in which the
//! calls arrive. Each call waits a random moment first, as a real device's calls do.

use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use wormhole_device::{
    CuError, Description, Device, DeviceOutput, Fill, ImageKind, Launch, LoadedFunction,
    LoadedModule, RawEvent, RawFunction, RawModule, RawStream, Result,
};

use super::random::Random;

#[derive(Debug)]
pub struct Recorder {
    description: Description,
    log: Mutex<Vec<u32>>,
    /// Streams, events and allocations that exist.
    live: Mutex<HashSet<u64>>,
    next: AtomicU64,
    random: Random,
}

impl Recorder {
    pub fn new() -> Self {
        Self {
            description: Description {
                name: "recorder".to_owned(),
                uuid: [0; 16],
                total_memory: 1 << 30,
                driver_version: 13000,
                attributes: Vec::new(),
                stream_priorities: (0, 0),
            },
            log: Mutex::new(Vec::new()),
            live: Mutex::new(HashSet::from([RawStream::LEGACY.0])),
            next: AtomicU64::new(0x6000_0000_0000),
            random: Random::new(7),
        }
    }

    /// The numbers so far, in order of arrival.
    pub fn log(&self) -> Vec<u32> {
        self.log.lock().unwrap().clone()
    }

    fn enter(&self, number: u32) {
        self.random.delay();
        self.log.lock().unwrap().push(number);
    }

    fn make(&self) -> u64 {
        let made = self.next.fetch_add(1 << 20, Ordering::Relaxed);
        self.live.lock().unwrap().insert(made);
        made
    }

    fn check(&self, thing: u64) -> Result<()> {
        if self.live.lock().unwrap().contains(&thing) {
            Ok(())
        } else {
            Err(CuError::INVALID_HANDLE)
        }
    }

    fn end(&self, thing: u64) -> Result<()> {
        if self.live.lock().unwrap().remove(&thing) {
            Ok(())
        } else {
            Err(CuError::INVALID_HANDLE)
        }
    }
}

impl Device for Recorder {
    fn bind_thread(&self) -> Result<()> {
        Ok(())
    }
    fn describe(&self) -> &Description {
        &self.description
    }
    fn health(&self, _: &[RawStream]) -> Option<CuError> {
        None
    }
    fn take_output(&self) -> DeviceOutput {
        DeviceOutput::default()
    }
    fn memory_info(&self) -> Result<(u64, u64)> {
        Ok((0, 1 << 30))
    }
    fn allocate(&self, _: u64) -> Result<u64> {
        Ok(self.make())
    }
    fn free(&self, address: u64) -> Result<()> {
        self.end(address)
    }
    unsafe fn register(&self, _: u64, _: u64) -> Result<()> {
        Ok(())
    }
    fn unregister(&self, _: u64) -> Result<()> {
        Ok(())
    }
    fn copy(&self, _: u64, _: u64, _: u64, stream: RawStream) -> Result<()> {
        self.check(stream.0)
    }
    fn write(&self, _: u64, _: &[u8], stream: RawStream) -> Result<()> {
        self.check(stream.0)
    }
    fn fill(&self, fill: Fill, stream: RawStream) -> Result<()> {
        self.check(stream.0)?;
        self.check(fill.destination)?;
        self.enter(fill.value);
        Ok(())
    }
    fn create_stream(&self, flags: u32, _: i32) -> Result<RawStream> {
        let made = self.make();
        self.enter(flags);
        Ok(RawStream(made))
    }
    fn destroy_stream(&self, stream: RawStream) -> Result<()> {
        self.end(stream.0)
    }
    fn query_stream(&self, stream: RawStream) -> Result<bool> {
        self.check(stream.0).map(|()| true)
    }
    fn synchronize_stream(&self, stream: RawStream) -> Result<()> {
        self.check(stream.0)
    }
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
    fn wait_event(&self, stream: RawStream, event: RawEvent, flags: u32) -> Result<()> {
        self.check(stream.0)?;
        self.check(event.0)?;
        self.enter(flags);
        Ok(())
    }
    fn write_fence(&self, stream: RawStream, _: u64, _: u64) -> Result<()> {
        self.check(stream.0)
    }
    fn create_event(&self, _: u32) -> Result<RawEvent> {
        Ok(RawEvent(self.make()))
    }
    fn destroy_event(&self, event: RawEvent) -> Result<()> {
        self.end(event.0)
    }
    fn record_event(&self, event: RawEvent, stream: RawStream, flags: u32) -> Result<()> {
        self.check(stream.0)?;
        self.check(event.0)?;
        self.enter(flags);
        Ok(())
    }
    fn query_event(&self, event: RawEvent) -> Result<bool> {
        self.check(event.0).map(|()| true)
    }
    fn synchronize_event(&self, event: RawEvent) -> Result<()> {
        self.check(event.0)
    }
    fn elapsed(&self, _: RawEvent, _: RawEvent) -> Result<f32> {
        Err(CuError::NOT_SUPPORTED)
    }
    fn load(&self, _: &[u8], _: ImageKind) -> Result<LoadedModule> {
        Err(CuError::NOT_SUPPORTED)
    }
    fn unload(&self, _: RawModule) -> Result<()> {
        Err(CuError::NOT_SUPPORTED)
    }
    fn function(&self, _: RawModule, _: &str) -> Result<LoadedFunction> {
        Err(CuError::NOT_SUPPORTED)
    }
    fn global(&self, _: RawModule, _: &str) -> Result<(u64, u64)> {
        Err(CuError::NOT_SUPPORTED)
    }
    fn function_attribute(&self, _: RawFunction, _: i32) -> Result<i32> {
        Err(CuError::NOT_SUPPORTED)
    }
    fn set_function_attribute(&self, _: RawFunction, _: i32, _: i32) -> Result<()> {
        Err(CuError::NOT_SUPPORTED)
    }
    fn set_cache_config(&self, _: RawFunction, _: u32) -> Result<()> {
        Err(CuError::NOT_SUPPORTED)
    }
    fn occupancy(&self, _: RawFunction, _: u32, _: u64, _: u32) -> Result<i32> {
        Err(CuError::NOT_SUPPORTED)
    }
    fn launch(&self, _: &Launch<'_>) -> Result<()> {
        Err(CuError::NOT_SUPPORTED)
    }
    fn limit(&self, _: u32) -> Result<u64> {
        Err(CuError::NOT_SUPPORTED)
    }
    fn set_limit(&self, _: u32, _: u64) -> Result<()> {
        Err(CuError::NOT_SUPPORTED)
    }
    fn reset(&self) -> Result<()> {
        Err(CuError::NOT_SUPPORTED)
    }
}
