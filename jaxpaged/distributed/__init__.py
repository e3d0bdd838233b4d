"""One engine in several processes: process 0 schedules and answers, the others replay what it does with the device."""
