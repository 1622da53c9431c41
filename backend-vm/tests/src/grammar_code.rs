//! Valid records of module references and green contexts.

use wormhole_api::{
    GreenCreate, GreenDescribe, GreenDestroy, GreenPartNumber, GreenSplit, GreenStream, Items,
    ReferenceBindSurface, ReferenceFind, ReferenceTo,
};

use crate::attack::Entry;
use crate::grammar::{Things, entry};
use crate::guest::Guest;
use crate::messages::bind_texture;

/// Returns records that find and bind the module's references.
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

/// Records name the first green context and the part of all multiprocessors: both exist and have
/// the number 1, which the next green context gets after the first is destroyed.
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
