//! The hooks of an interface, and the names of their pins.

/// One program at one interface; the pin's name is made of both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    AgentTc,
    AgentXdp,
    TransitTc,
    TransitXdp,
}

impl Hook {
    pub fn program(self) -> &'static str {
        match self {
            Self::AgentTc => "agent_tc",
            Self::AgentXdp => "agent_xdp",
            Self::TransitTc => "transit_tc",
            Self::TransitXdp => "transit_xdp",
        }
    }

    pub(super) fn at_xdp(self) -> bool {
        matches!(self, Self::AgentXdp | Self::TransitXdp)
    }

    /// Returns the pin's name. bpffs takes no dots, and interface names may have them.
    pub(super) fn pin_name(self, interface: &str) -> String {
        format!("{}_{}", self.program(), interface.replace('.', "_"))
    }
}
