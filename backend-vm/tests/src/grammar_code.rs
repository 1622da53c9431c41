//! Valid records of what came late: references of modules, and green contexts.

use wormhole_api::{
    GreenCreate, GreenDescribe, GreenDestroy, GreenPartNumber, GreenSplit, GreenStream, Items,
    ReferenceBindSurface, ReferenceFind, ReferenceTo,
};

use crate::attack::Entry;
use crate::grammar::{Things, entry};
use crate::guest::Guest;
use crate::messages::bind_texture;

/// Of the module's references, and of what there is to bind.
pub fn references(things: &Things) -> Vec<Entry> {
    let Things { module, array, .. } = *things;
    let name: &[u8] = b"texture";
    vec![
        entry(&ReferenceFind {
            module,
            to: ReferenceTo::Texture,
            name,
        }),
        entry(&bind_texture(module, Some(array), name)),
        entry(&ReferenceBindSurface {
            module,
            array,
            name: b"surface",
        }),
    ]
}

/// The first green context, and of all multiprocessors: both are there and have the number 1, which the next
/// green context gets when that one is destroyed.
pub fn green_contexts(guest: &mut Guest) -> Vec<Entry> {
    let parts = [GreenPartNumber { number: 1 }];
    vec![
        entry(&GreenDescribe { green: 0 }),
        entry(&GreenSplit {
            part: 1,
            flags: 0,
            least: 1,
            groups: 2,
        }),
        entry(&GreenCreate {
            parts: Items::new(&parts),
        }),
        entry(&GreenCreate {
            parts: Items::new(&[]),
        }),
        entry(&GreenStream {
            new: guest.mint(),
            green: 1,
            flags: 1,
            priority: 0,
        }),
        entry(&GreenDestroy { green: 1 }),
    ]
}
