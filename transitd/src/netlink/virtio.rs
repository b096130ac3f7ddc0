//! What the driver virtio_net does with native XDP, which the kernel tells nobody: read from the features that driver
//! and hypervisor agreed on.

use std::fs;

/// The driver's name, as ethtool tells it.
pub const DRIVER: &str = "virtio_net";

/// Bits of virtio's network card (virtio 1.2, section 5.1.3).
/// The hypervisor tells an MTU.
const MTU: usize = 3;
const GUEST_TSO4: usize = 7;
const GUEST_TSO6: usize = 8;
const GUEST_ECN: usize = 9;
const GUEST_UFO: usize = 10;
const MRG_RXBUF: usize = 15;
const GUEST_USO4: usize = 54;
const GUEST_USO6: usize = 55;

/// Whether the driver takes a program at native XDP and then shows it no frame: virtio_net does so where the
/// hypervisor may send frames of many segments or tells an MTU above 1500, and each frame comes in a chain of pages
/// (`receive_big` of drivers/net/virtio_net.c, 6.12). Which MTU it tells isn't read: any may be above 1500. `false` for
/// an interface without such features.
pub fn hides_frames_from_xdp(interface: &str) -> bool {
    let path = format!("/sys/class/net/{interface}/device/features");
    fs::read_to_string(path).is_ok_and(|features| has_big_buffers(features.trim()))
}

/// Reads the features as sysfs shows them: a digit for each bit, the lowest first.
fn has_big_buffers(features: &str) -> bool {
    let has = |bit: usize| features.as_bytes().get(bit) == Some(&b'1');
    let segments = [GUEST_TSO4, GUEST_TSO6, GUEST_ECN, GUEST_UFO]
        .into_iter()
        .any(has);
    (segments || has(MTU) || has(GUEST_USO4) && has(GUEST_USO6)) && !has(MRG_RXBUF)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn features(bits: &[usize]) -> String {
        (0..64)
            .map(|bit| if bits.contains(&bit) { '1' } else { '0' })
            .collect()
    }

    #[test]
    fn big_buffers_are_for_what_nothing_merges() {
        assert!(has_big_buffers(&features(&[GUEST_TSO4])));
        assert!(has_big_buffers(&features(&[GUEST_USO4, GUEST_USO6])));
        assert!(has_big_buffers(&features(&[MTU])));
        for others in [
            &[][..],
            &[GUEST_TSO4, MTU, MRG_RXBUF],
            &[GUEST_USO6],
            &[MRG_RXBUF],
        ] {
            assert!(!has_big_buffers(&features(others)), "{others:?}");
        }
        assert!(!has_big_buffers(""));
    }

    #[test]
    fn an_interface_without_features_hides_nothing() {
        assert!(!hides_frames_from_xdp("lo"));
    }
}
