//! Kernel launches and what is asked of kernels.

use wormhole_api::{CuResult, LaunchKernel};
use wormhole_device::{CuError, Launch, LaunchAttribute};

use super::{Session, to_result};

/// Launch attributes whose value is plain numbers (`CUlaunchAttributeID`): cooperative, synchronization
/// policy, cluster dimension and its scheduling, programmatic stream serialization, priority, memory
/// synchronization domain map and domain, preferred cluster dimension, preferred shared memory carveout.
/// What is left out carries pointers or handles, which a driver would believe.
const PLAIN: &[u32] = &[2, 3, 4, 5, 6, 8, 9, 10, 11, 14];
/// No attribute (`CU_LAUNCH_ATTRIBUTE_IGNORE`).
const IGNORE: u32 = 0;

impl Session {
    pub(super) fn launch(&mut self, message: &LaunchKernel<'_>) -> Result<(), CuResult> {
        let stream = self.stream(message.stream)?.raw;
        let function = self.function(message.function)?.raw;
        let mut attributes = Vec::with_capacity(message.attributes.len());
        for attribute in message.attributes.iter() {
            if attribute.id == IGNORE {
                continue;
            }
            if !PLAIN.contains(&attribute.id) {
                return Err(to_result(CuError::NOT_SUPPORTED));
            }
            attributes.push(LaunchAttribute {
                id: attribute.id,
                value: attribute.value,
            });
        }
        self.done(self.device.launch(&Launch {
            function,
            stream,
            grid: message.grid,
            block: message.block,
            shared: message.shared,
            attributes: &attributes,
            parameters: message.parameters,
        }))
    }
}
