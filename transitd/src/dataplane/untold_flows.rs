//! What programs count in SEEN_FLOWS until they tell it. Programs count; user space takes what remains of flows that
//! have gone silent.

use std::path::Path;

use thuban_common::flow_events::{SeenFlowEntry, SeenFlowKey, TELL_EVERY};

use super::seen_flows::SEEN_FLOWS;
use super::tables::{Hash, IS_THERE, TableError, access, is_missing, lru};
use super::walk::Walk;

/// Takes what is untold of flows whose last event is too long ago: of at most `most` of them, and of the others at the
/// next call. A program that counts a packet at the same moment loses it. `now`: ns of the programs' clock.
pub fn take_rests(
    maps: &Path,
    now: u64,
    most: usize,
    mut tell: impl FnMut(&SeenFlowKey, &SeenFlowEntry),
) -> Result<(), TableError> {
    let mut entries: Hash<SeenFlowKey, SeenFlowEntry> = lru(maps, SEEN_FLOWS)?;
    let mut left = most;
    Walk::open(maps, SEEN_FLOWS)?.each(|key: SeenFlowKey, entry: SeenFlowEntry| {
        if left == 0 || !has_rest(&entry, now) {
            return Ok(());
        }
        match entries.insert(key, told(entry, now), IS_THERE) {
            Ok(()) => {
                left -= 1;
                tell(&key, &entry);
                Ok(())
            }
            // It was evicted meanwhile.
            Err(error) if is_missing(&error) => Ok(()),
            Err(error) => Err(access("write", SEEN_FLOWS)(error)),
        }
    })
}

/// Whether packets are untold for so long that the flow's programs had told them, if another packet had come.
const fn has_rest(entry: &SeenFlowEntry, now: u64) -> bool {
    entry.packets > 0 && now.saturating_sub(entry.told) >= TELL_EVERY
}

/// Returns the entry once all is told.
const fn told(entry: SeenFlowEntry, now: u64) -> SeenFlowEntry {
    SeenFlowEntry {
        told: now,
        packets: 0,
        bytes: 0,
        tcp_flags: 0,
        ..entry
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_waits_as_long_as_programs_wait_is_rest() {
        let entry = SeenFlowEntry {
            told: 5,
            packets: 2,
            bytes: 99,
            tcp_flags: 16,
            has_ended: 1,
            ..SeenFlowEntry::default()
        };
        assert!(!has_rest(&entry, 4 + TELL_EVERY));
        assert!(has_rest(&entry, 5 + TELL_EVERY));
        assert!(!has_rest(&entry, 0), "another CPU's clock may be ahead");
        let now = 6 + TELL_EVERY;
        let told = told(entry, now);
        assert_eq!(
            (told.told, told.packets, told.bytes, told.tcp_flags),
            (now, 0, 0, 0)
        );
        assert_eq!(told.has_ended, 1, "an end is told once");
        assert!(!has_rest(&told, now + 2 * TELL_EVERY));
    }
}
