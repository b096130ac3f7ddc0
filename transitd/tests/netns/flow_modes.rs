//! The table of flows in the kernel, without a daemon: its size in each mode, and what a restart keeps.

use aya::maps::{HashMap, Map, MapData, MapInfo};
use thuban_common::flow_events::{SEEN_DROPS_CAPACITY, SEEN_FLOWS_CAPACITY, SeenFlowEntry, SeenFlowKey};
use transitd::settings::FlowMode;

use crate::service_tables::Pinned;

fn entries(pinned: &Pinned) -> u32 {
    let info = MapInfo::from_pin(pinned.maps.join("SEEN_FLOWS"));
    info.unwrap().max_entries()
}

fn table(pinned: &Pinned) -> HashMap<MapData, SeenFlowKey, SeenFlowEntry> {
    let data = MapData::from_pin(pinned.maps.join("SEEN_FLOWS")).unwrap();
    HashMap::try_from(Map::LruHashMap(data)).unwrap()
}

#[test]
fn a_restart_keeps_known_flows_unless_the_mode_changes() {
    let pinned = Pinned::new("SLOTS", 1024);
    assert_eq!(entries(&pinned), 1);
    let key = SeenFlowKey::default();
    for (mode, expected) in [
        (FlowMode::Drops, SEEN_DROPS_CAPACITY),
        (FlowMode::All, SEEN_FLOWS_CAPACITY),
        (FlowMode::Drops, SEEN_DROPS_CAPACITY),
    ] {
        pinned.load(mode);
        assert_eq!(entries(&pinned), expected, "{mode:?}");
        assert_eq!(table(&pinned).keys().count(), 0, "{mode:?}: a table made anew");
        table(&pinned).insert(key, SeenFlowEntry::default(), 0).unwrap();
        pinned.load(mode);
        assert!(table(&pinned).get(&key, 0).is_ok(), "{mode:?}: the same table");
    }
    pinned.load(FlowMode::Off);
    assert_eq!(entries(&pinned), 1);
}
