//! What the host asks of the machine and what the machine answers: a line of JSON each, on the serial console.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use thuban_e2e::rig::Transit;

/// Every line of the machine that is for the host begins with it; all other lines are the kernel's.
pub const MARK: &str = "nic: ";

/// Where the programs are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Hooks {
    /// Transit and agents at tc, frames as they come.
    Tc,
    /// The same behind the kernel's aggregation, which is what transitd makes where transit is at tc.
    Aggregated,
    /// Transit at XDP, agents at tc.
    Xdp,
    /// All at XDP.
    XdpAgents,
}

impl Hooks {
    pub fn transit(self) -> Transit {
        match self {
            Self::Tc => Transit::Tc,
            Self::Aggregated => Transit::Aggregated,
            Self::Xdp | Self::XdpAgents => Transit::Xdp,
        }
    }

    pub fn is_xdp(self) -> bool {
        self.transit() == Transit::Xdp
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Tc => "tc",
            Self::Aggregated => "tc, aggregated",
            Self::Xdp => "XDP",
            Self::XdpAgents => "XDP, agents too",
        }
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Request {
    /// Try native XDP on a card, and then let transitd choose the hook (`auto`).
    Choose { mac: [u8; 6], mtu: u32 },
    /// Make the droplet of a card.
    Begin { mac: [u8; 6], hooks: Hooks, mtu: u32 },
    /// Read all counters.
    Count,
    /// Remove the droplet.
    Finish,
    /// Power off.
    End,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Reply {
    /// The machine is up.
    Ready {
        release: String,
    },
    Chosen(Choice),
    Counted(Counts),
    Done,
    Failed(String),
}

/// How a card took transit.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Choice {
    pub driver: String,
    /// The kernel's refusal of native XDP.
    pub refusal: Option<String>,
    /// The hook that `auto` chose: `xdp` or `tc`.
    pub hook: String,
    /// Whether the kernel runs a program at native XDP after `auto`.
    pub is_native: bool,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Counts {
    /// Of the programs.
    pub programs: BTreeMap<String, u64>,
    pub driver: DriverCounts,
}

/// The counts of the card's driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriverCounts {
    /// Frames that the program at native XDP saw.
    pub seen: u64,
    /// Frames that it sent back out (`XDP_TX`).
    pub turned: u64,
    /// Frames that it dropped.
    pub dropped: u64,
}
