//! What a session's handles stand for.

use std::sync::Arc;

use wormhole_api::{Function, Handle, Library, Module};
use wormhole_device::{Device, RawEvent, RawFunction, RawModule, RawStream};

/// A stream. Jobs and the watcher hold it while they use it, so that it outlives its handle.
#[derive(Debug)]
pub struct StreamObject {
    pub raw: RawStream,
}

/// An event; held like a stream.
#[derive(Debug)]
pub struct EventObject {
    pub raw: RawEvent,
}

/// A loaded image, under the handle of a module or of a library.
#[derive(Debug)]
pub struct ImageObject {
    pub raw: RawModule,
    /// What was handed out of it and goes with it.
    pub functions: Vec<Handle<Function>>,
    /// Starts of the global variables that may be copied to and from.
    pub globals: Vec<u64>,
    /// Modules that are this library by another name.
    pub aliases: Vec<Handle<Module>>,
    /// The library that this module is by another name.
    pub library: Option<Handle<Library>>,
}

impl ImageObject {
    pub fn new(raw: RawModule) -> Self {
        Self {
            raw,
            functions: Vec::new(),
            globals: Vec::new(),
            aliases: Vec::new(),
            library: None,
        }
    }
}

/// A kernel.
#[derive(Clone, Copy, Debug)]
pub struct FunctionObject {
    pub raw: RawFunction,
}

/// Streams and events whose handle is gone while somebody still uses them.
#[derive(Debug, Default)]
pub struct Graveyard {
    streams: Vec<Arc<StreamObject>>,
    events: Vec<Arc<EventObject>>,
}

impl Graveyard {
    /// Destroys the stream now, or when its last user is done.
    pub fn bury_stream(
        &mut self,
        device: &dyn Device,
        stream: Arc<StreamObject>,
    ) -> wormhole_device::Result<()> {
        match Arc::try_unwrap(stream) {
            Ok(stream) => device.destroy_stream(stream.raw),
            Err(used) => {
                self.streams.push(used);
                Ok(())
            }
        }
    }

    /// Destroys the event now, or when its last user is done.
    pub fn bury_event(
        &mut self,
        device: &dyn Device,
        event: Arc<EventObject>,
    ) -> wormhole_device::Result<()> {
        match Arc::try_unwrap(event) {
            Ok(event) => device.destroy_event(event.raw),
            Err(used) => {
                self.events.push(used);
                Ok(())
            }
        }
    }

    /// Destroys what nobody uses any more.
    pub fn sweep(&mut self, device: &dyn Device) {
        for stream in std::mem::take(&mut self.streams) {
            if let Err(error) = self.bury_stream(device, stream) {
                tracing::debug!("destroying a stream: {error}");
            }
        }
        for event in std::mem::take(&mut self.events) {
            if let Err(error) = self.bury_event(device, event) {
                tracing::debug!("destroying an event: {error}");
            }
        }
    }

    /// Forgets everything: the context it belonged to is gone.
    pub fn clear(&mut self) {
        self.streams.clear();
        self.events.clear();
    }
}
