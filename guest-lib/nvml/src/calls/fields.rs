//! Implements readings in structures: temperatures and field values.

use std::time::{SystemTime, UNIX_EPOCH};

use nvml_wrapper_sys::bindings::field_id::NVML_FI_DEV_NVLINK_GET_STATE;
use nvml_wrapper_sys::bindings::*;
use wormhole_api::nvml::FIELDS;
use wormhole_ring::control::facts;

use super::links::is_active;
use super::version;
use crate::error::{NvmlError, Result};
use crate::library::{Age, library};
use crate::view::View;

pub unsafe fn nvmlDeviceGetTemperatureV(
    device: nvmlDevice_t,
    place: *mut nvmlTemperature_t,
) -> Result {
    let library = library();
    let device = library.device(device)?;
    // SAFETY: null, or a valid structure of the caller.
    let Some(reading) = (unsafe { place.as_mut() }) else {
        return Err(NvmlError::INVALID_ARGUMENT);
    };
    if reading.version != version::<nvmlTemperature_t>(1) {
        return Err(NvmlError::VERSION_MISMATCH);
    }
    // The only sensor is NVML_TEMPERATURE_GPU.
    if reading.sensorType != 0 {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    let view = library.view(device, Age::Recent)?;
    let mut number = [0];
    let said = view
        .host("nvmlDeviceGetTemperature", 0)
        .and_then(|answer| facts::read_answer(answer, &mut number));
    match said {
        Some(Ok(())) => {
            reading.temperature = i32::try_from(number[0]).map_err(|_| NvmlError::NOT_SUPPORTED)?;
            Ok(())
        }
        Some(Err(code)) => Err(NvmlError(code)),
        None => Err(NvmlError::NOT_SUPPORTED),
    }
}

/// Reads fields. Each field has its own return code.
pub unsafe fn nvmlDeviceGetFieldValues(
    device: nvmlDevice_t,
    count: i32,
    values: *mut nvmlFieldValue_t,
) -> Result {
    let library = library();
    let device = library.device(device)?;
    let count = usize::try_from(count).unwrap_or(0);
    if count == 0 || values.is_null() {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    let view = library.view(device, Age::Recent)?;
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    for at in 0..count {
        // SAFETY: the caller's array has `count` structures.
        let value = unsafe { &mut *values.add(at) };
        value.timestamp = i64::try_from(now.as_micros()).unwrap_or(i64::MAX);
        value.latencyUsec = 0;
        match field(&view, value.fieldId, value.scopeId) {
            Ok((kind, bits)) => {
                value.valueType = kind;
                value.value = nvmlValue_t { ullVal: bits };
                value.nvmlReturn = 0;
            }
            Err(error) => value.nvmlReturn = error.0,
        }
    }
    Ok(())
}

/// Returns the type and the bits of a field; `scope` is the number of an NVLink.
fn field(view: &View, id: u32, scope: u32) -> Result<(nvmlValueType_t, u64)> {
    let field = FIELDS.iter().find(|field| field.id == id);
    let field = field.ok_or(NvmlError::NOT_SUPPORTED)?;
    let call = field.call(scope).ok_or(NvmlError::INVALID_ARGUMENT)?;
    let mut answer = [0; 2];
    let said = view
        .field(id, call)
        .and_then(|text| facts::read_answer(text, &mut answer));
    let bits = match said {
        Some(Ok(())) if id == NVML_FI_DEV_NVLINK_GET_STATE && !is_active(view, scope) => 0,
        Some(Ok(())) => answer[1],
        Some(Err(code)) => return Err(NvmlError(code)),
        None => return Err(NvmlError::NOT_SUPPORTED),
    };
    let kind = u32::try_from(answer[0]).map_err(|_| NvmlError::NOT_SUPPORTED)?;
    Ok((kind, bits))
}
