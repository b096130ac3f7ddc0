//! VPCs don't mix, and nobody is believed who is not who he says.
