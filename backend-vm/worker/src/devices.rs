//! The session's devices.

use std::ops::{Deref, Index};
use std::sync::Arc;

use wormhole_api::CuResult;
use wormhole_device::{CuError, Device, DeviceOutput, Result};
use wormhole_link::device::MOST;

/// One of the session's devices, and the number by which messages name it. Objects of the device hold it.
#[derive(Clone, Debug)]
pub struct SessionDevice {
    number: usize,
    device: Arc<dyn Device>,
}

impl Deref for SessionDevice {
    type Target = dyn Device;

    fn deref(&self) -> &Self::Target {
        self.device.as_ref()
    }
}

impl PartialEq for SessionDevice {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl SessionDevice {
    pub fn number(&self) -> usize {
        self.number
    }

    /// Passes a handle of `owner` on to this device.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE`: this is another device.
    #[inline]
    pub fn own<T>(&self, owner: &Self, raw: T) -> Result<T> {
        if self == owner {
            Ok(raw)
        } else {
            Err(CuError::INVALID_HANDLE)
        }
    }
}

/// All devices of the session, by their numbers.
#[derive(Clone, Debug)]
pub struct Devices(Arc<[SessionDevice]>);

impl Devices {
    /// Numbers devices of one kind.
    ///
    /// # Panics
    /// There are none, or more than [`MOST`].
    #[must_use]
    pub fn new(devices: Vec<Arc<dyn Device>>) -> Self {
        assert!((1..=MOST).contains(&devices.len()));
        let numbered = devices.into_iter().enumerate();
        Self(
            numbered
                .map(|(number, device)| SessionDevice { number, device })
                .collect(),
        )
    }

    /// Finds a device by the number in a message.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_DEVICE`: there are not so many.
    pub fn get(&self, number: u32) -> std::result::Result<&SessionDevice, CuResult> {
        let number = usize::try_from(number).map_err(|_| CuResult::INVALID_DEVICE)?;
        self.0.get(number).ok_or(CuResult::INVALID_DEVICE)
    }

    pub fn iter(&self) -> std::slice::Iter<'_, SessionDevice> {
        self.0.iter()
    }

    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The sticky error of the first context that is dead.
    pub fn fault(&self) -> Option<CuError> {
        self.iter().find_map(|device| device.health(&[]))
    }

    /// Takes the text of all devices.
    pub fn take_output(&self) -> DeviceOutput {
        let mut all = DeviceOutput::default();
        for device in self.iter() {
            let text = device.take_output();
            all.stdout.extend(text.stdout);
            all.stderr.extend(text.stderr);
        }
        all
    }

    /// Describes the devices' queues, a line each.
    pub fn queues(&self) -> Vec<String> {
        let several = self.count() > 1;
        let lines = self.iter().flat_map(|device| {
            device.queues().into_iter().map(move |line| match several {
                true => format!("device {}: {line}", device.number),
                false => line,
            })
        });
        lines.collect()
    }
}

impl Index<usize> for Devices {
    type Output = SessionDevice;

    fn index(&self, number: usize) -> &SessionDevice {
        &self.0[number]
    }
}
