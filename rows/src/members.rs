//! Droplets that carry a role.

use crate::droplet::Underlay;
use crate::fields::{InvalidRow, invalid};

/// The most bouncers of a network, and the most dividers of a VPC: the next hop of a packet is picked among them
/// without a table.
pub const MAX_MEMBERS: usize = 8;

/// Droplets whose role is used, and droplets that only pass on packets that still arrive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Members {
    /// Droplets whose role is used: sorted, because every droplet must rank the same list; at most [`MAX_MEMBERS`].
    pub used: Vec<Underlay>,
    pub relays: Vec<Underlay>,
}

impl Members {
    pub(crate) fn read(used: &[Vec<u8>], relays: &[Vec<u8>]) -> Result<Self, InvalidRow> {
        if used.len() > MAX_MEMBERS {
            return Err(invalid("members", "at most 8 droplets"));
        }
        let all = |list: &[Vec<u8>]| -> Result<Vec<Underlay>, InvalidRow> {
            list.iter().map(|bytes| Underlay::read(bytes)).collect()
        };
        let (mut used, relays) = (all(used)?, all(relays)?);
        used.sort_unstable();
        Ok(Self { used, relays })
    }
}

pub fn octets(droplets: &[Underlay]) -> Vec<Vec<u8>> {
    let each = droplets.iter().map(|droplet| droplet.octets().to_vec());
    each.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_ranked_alike_whatever_their_order_and_bounded() {
        let told = |numbers: &[u8]| -> Vec<Vec<u8>> { numbers.iter().map(|n| vec![1, 1, 1, *n]).collect() };
        let read = Members::read(&told(&[3, 1, 2]), &told(&[9, 8])).unwrap();
        assert_eq!(octets(&read.used), told(&[1, 2, 3]));
        assert_eq!(octets(&read.relays), told(&[9, 8]));
        let many: Vec<u8> = (0..9).collect();
        assert!(Members::read(&told(&many), &[]).is_err());
        assert!(Members::read(&told(&many[..8]), &told(&many)).is_ok());
        assert!(Members::read(&[vec![1, 2, 3]], &[]).is_err());
    }
}
